"""The certificate of a worker, and what is wrong with one. (tests/unit/port/test_tls.py)

The authority is the world's own: every certificate that it has signed belongs to the world. So both
ends of a connection must show one, and names in certificates are not compared.
"""

import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field

from .certificates import Certificate, Files, reason_of


class TlsError(OSError):
    """No connection: one end refuses the other's certificate, or does not use TLS."""


@dataclass(frozen=True, slots=True)
class Tls:
    """The certificate with which a worker proves itself to the workers on other hosts.

        tls = aiorpc.Tls("worker.pem", "worker.key", "ca.pem")

    The files are in PEM format. They are read again once they have changed: new connections use the
    new certificate. Every worker of the world needs a certificate of one authority, which signs for
    this world alone: whoever has such a certificate may run code in the workers. Names in
    certificates are not compared.

    Args:
        cert: File with the certificate, followed by intermediate ones.
        key: File with its private key, not encrypted.
        ca: File with the certificate of the authority; while that is replaced, of both.

    Raises:
        ValueError: If a file is missing or cannot be read, or if the key does not fit; it names
            the file.
    """

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    _certificate: Certificate = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        files = Files(self.cert, self.key, self.ca)
        object.__setattr__(self, "_certificate", Certificate(files))

    def __reduce__(self) -> tuple[type["Tls"], tuple[object, ...]]:
        return Tls, (self.cert, self.key, self.ca)

    @property
    def server(self) -> ssl.SSLContext:
        """Return the settings of the end that was connected to, for one connection."""
        return self._certificate.loaded().server

    @property
    def client(self) -> ssl.SSLContext:
        """Return the settings of the end that connects, for one connection."""
        return self._certificate.loaded().client

    @property
    def expiry(self) -> str:
        """Return when the certificate expires, as text."""
        return self._certificate.latest.expiry

    @property
    def expired(self) -> str:
        """Return which file has expired and when, "" if none has."""
        return self._certificate.latest.expired

    def check(self) -> None:
        """Connect with itself, in memory; warn if the certificate expires soon.

        Raises:
            ValueError: if others would refuse the certificate: it has expired, is of another
                authority or for another use.
        """
        self._certificate.check()

    def look(self) -> None:
        """Read the files again soon, if they have changed; warn if the certificate ends soon."""
        self._certificate.look()

    @contextlib.contextmanager
    def explaining(self, peer: str) -> Iterator[None]:
        """Raise `TlsError` for errors of a connection with `peer`, which names the certificate."""
        try:
            yield
        except ssl.SSLError as exc:
            raise TlsError(self._explain(exc, peer)) from exc

    def _explain(self, exc: ssl.SSLError, peer: str) -> str:
        text = reason_of(exc)
        if isinstance(exc, ssl.SSLCertVerificationError):
            return f"the certificate of {peer} is refused, by {self.ca}: {text}"
        if "alert" in text:  # the other end tells
            until = f" (it expires on {self.expiry})" if "expired" in text else ""
            return f"{peer} refuses the certificate in {self.cert}: {text}{until}"
        if exc.reason in _NO_TLS:
            return f"{peer} does not use TLS: give every worker tls="
        return f"no TLS connection with {peer}: {text}"


_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "RECORD_LAYER_FAILURE")
