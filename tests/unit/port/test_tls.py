"""Certificates, and what is said of wrong ones."""

import pickle
import re
import ssl
from pathlib import Path

import pytest

from aiorpc_torch import Tls
from tests.support.certificates import Authority, openssl


@pytest.mark.promise("security.tls")
def test_a_certificate_is_checked(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    tls = authority.tls()
    tls.check()
    cert, key, ca = authority.files()
    assert tls == pickle.loads(pickle.dumps(tls)) == Tls(cert, key, ca)
    wrong = {
        r"the certificate in .*expired.pem has expired on 20.* UTC: renew it": authority.expired(),
        "self-signed certificate|unable to get local issuer": Tls(cert, key, other.ca),
    }
    for text, each in wrong.items():
        with pytest.raises(ValueError, match=text):
            each.check()


@pytest.mark.promise("security.tls")
def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    """The error names the file."""
    authority = Authority(tmp_path)
    cert, key, ca = authority.files()
    other_key = authority.files("other")[1]
    empty = tmp_path / "empty.pem"
    empty.touch()
    missing = str(tmp_path / "missing.pem")
    for files, text in {
        (missing, key, ca): f"{missing} cannot be used: No such file",
        (cert, missing, ca): f"{missing} cannot be used: No such file",
        (cert, key, missing): f"{missing} cannot be used: No such file",
        (cert, other_key, ca): f"{cert} with the key in {other_key} cannot be used: key values",
        (str(empty), key, ca): f"{empty} with the key in {key} cannot be used: it is not in PEM",
        (cert, key, str(empty)): f"{empty} cannot be used: no certificate",
    }.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            Tls(*files)


def test_an_encrypted_key(tmp_path: Path) -> None:
    """Nobody is asked for its password."""
    cert, key, ca = Authority(tmp_path).files()
    secret = str(tmp_path / "secret.key")
    openssl("ec", "-in", key, "-aes128", "-passout", "pass:abcd", "-out", secret)
    with pytest.raises(ValueError, match="the key is encrypted"):
        Tls(cert, secret, ca)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("TLSV1_ALERT_UNKNOWN_CA", "w1 refuses the certificate in .*: tlsv1 alert unknown ca"),
        ("WRONG_VERSION_NUMBER", "w1 does not use TLS: give every worker tls="),
        ("BAD_EXTENSION", "no TLS connection with w1: bad extension"),
    ],
)
def test_what_failed_is_explained(tmp_path: Path, reason: str, text: str) -> None:
    error = ssl.SSLError(1, "")
    error.reason = reason
    with (
        pytest.raises(OSError, match=text) as raised,
        Authority(tmp_path).tls().explaining("w1"),
    ):
        raise error
    assert not isinstance(raised.value, ssl.SSLError)
