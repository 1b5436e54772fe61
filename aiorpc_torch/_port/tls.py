"""The certificate of a worker, and what is wrong with one. (tests/unit/port/test_tls.py)

The authority is the world's own: every certificate that it has signed belongs to the world. So both
ends of a connection must show one, and names in certificates are not compared.
"""

import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field

NAME = "aiorpc"
"""Name of any server, where none is needed."""


class TlsError(OSError):
    """No connection: one end refuses the other's certificate, or does not use TLS."""


@dataclass(frozen=True, slots=True)
class Tls:
    """The certificate with which a worker proves itself to the workers on other hosts.

        tls = aiorpc.Tls("worker.pem", "worker.key", "ca.pem")

    The files are in PEM format, and are read once. Every worker of the world needs a certificate of
    one authority, which signs for this world alone: whoever has such a certificate may run code in
    the workers. Names in certificates are not compared.

    Args:
        cert: File with the certificate, followed by intermediate ones.
        key: File with its private key, not encrypted.
        ca: File with the certificate of the authority.

    Raises:
        ValueError: If a file is missing or cannot be read, or if the key does not fit; it names
            the file.
    """

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    _server: ssl.SSLContext = field(init=False, repr=False, compare=False)
    _client: ssl.SSLContext = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, side in (
            ("_server", ssl.PROTOCOL_TLS_SERVER),
            ("_client", ssl.PROTOCOL_TLS_CLIENT),
        ):
            object.__setattr__(self, name, self._context(side))
        # A ticket is never used, and one that is not read resets a connection as it is closed.
        self._server.num_tickets = 0

    def __reduce__(self) -> tuple[type["Tls"], tuple[object, ...]]:
        return Tls, (self.cert, self.key, self.ca)

    @property
    def server(self) -> ssl.SSLContext:
        """Return the settings of the end that was connected to."""
        return self._server

    @property
    def client(self) -> ssl.SSLContext:
        """Return the settings of the end that connects."""
        return self._client

    def check(self) -> None:
        """Connect with itself, in memory.

        Raises:
            ValueError: if others would refuse the certificate: it has expired, is of another
                authority or for another use.
        """
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self._client.wrap_bio(to_client, to_server, server_hostname=NAME)
        server = self._server.wrap_bio(to_server, to_client, server_side=True)
        try:
            for end in (client, server, client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLError as exc:
            raise ValueError(
                f"the certificate in {self.cert} is not valid with the authority in {self.ca}: "
                f"{_reason(exc)}"
            ) from exc

    @contextlib.contextmanager
    def explaining(self, peer: str) -> Iterator[None]:
        """Raise `TlsError` for errors of a connection with `peer`, which names the certificate."""
        try:
            yield
        except ssl.SSLError as exc:
            raise TlsError(self._explain(exc, peer)) from exc

    def _explain(self, exc: ssl.SSLError, peer: str) -> str:
        text = _reason(exc)
        if isinstance(exc, ssl.SSLCertVerificationError):
            return f"the certificate of {peer} is refused, by {self.ca}: {text}"
        if "alert" in text:  # the other end tells
            return f"{peer} refuses the certificate in {self.cert}: {text}"
        if exc.reason in _NO_TLS:
            return f"{peer} does not use TLS: give every worker tls="
        return f"no TLS connection with {peer}: {text}"

    def _context(self, side: int) -> ssl.SSLContext:
        found = ssl.SSLContext(side)
        found.check_hostname = False
        found.verify_mode = ssl.CERT_REQUIRED
        found.minimum_version = ssl.TLSVersion.TLSv1_3
        with reading(f"tls: {self.ca}"):
            found.load_verify_locations(self.ca)
        for each in (self.cert, self.key):
            with reading(f"tls: {each}"), open(each, "rb"):
                pass  # OpenSSL does not tell which one is missing
        with reading(f"tls: {self.cert} with the key in {self.key}"):
            found.load_cert_chain(self.cert, self.key, _no_password)
        return found


_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "RECORD_LAYER_FAILURE")


def _no_password() -> str:
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise ValueError if a file of a certificate cannot be used; `what` names it."""
    try:
        yield
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        if isinstance(exc, ssl.SSLError):
            reason = _reason(exc)
        else:
            reason = getattr(exc, "strerror", None) or str(exc)
        raise ValueError(f"{what} cannot be used: {reason}") from exc


def _reason(exc: ssl.SSLError) -> str:
    """Return what OpenSSL says, in words."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return exc.verify_message
    if not exc.reason:
        return "it is not in PEM format"
    return exc.reason.lower().replace("_", " ")
