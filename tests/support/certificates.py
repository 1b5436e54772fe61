"""Authorities and their certificates, made by the `openssl` command."""

import shutil
import subprocess
from pathlib import Path

import pytest

import aiorpc_torch as aiorpc

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """An authority in a folder of its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl command here")
        self.folder = folder / name
        self.folder.mkdir()
        self.ca = self.folder / "ca.pem"
        key, subject = str(self.folder / "ca.key"), ("-subj", f"/CN={name}")
        self._key = key
        openssl("req", "-x509", *CURVE, "-keyout", key, "-out", str(self.ca), *subject)

    def files(
        self, name: str = "worker", days: int = 30, *, is_named: bool = False
    ) -> tuple[str, str, str]:
        """A new certificate, its key, and the authority's own.

        If it is named, it is valid for the server `name` of clients that compare names.
        """
        cert, key, request = (str(self.folder / f"{name}.{end}") for end in ("pem", "key", "csr"))
        openssl("req", *CURVE, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signed: tuple[str, ...] = (
            "-CA",
            str(self.ca),
            "-CAkey",
            self._key,
            "-CAcreateserial",
            "-days",
            str(days),
        )
        if is_named:
            names = self.folder / f"{name}.names"
            names.write_text(f"subjectAltName=DNS:{name}")
            signed = (*signed, "-extfile", str(names))
        openssl("x509", "-req", "-in", request, "-out", cert, *signed)
        return cert, key, str(self.ca)

    def renew(self, name: str = "worker", days: int = 30) -> None:
        """Replace a certificate and its key."""
        self.files(name, days)

    def tls(self, name: str = "worker", days: int = 30) -> aiorpc.Tls:
        return aiorpc.Tls(*self.files(name, days))

    def expired(self) -> aiorpc.Tls:
        return self.tls("expired", days=-1)


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=30)
