"""The certificate of a worker: its files, read again when they change, and what is wrong with one.

The authority is the world's own: every certificate that it has signed belongs to the world. So both
ends of a connection must show one, and names in certificates are not compared.

A look at the files is due when a connection is made or accepted, and now and then. It runs in a
thread: the file system may hang. (tests/unit/port/test_tls.py, test_certificate_looks.py)
"""

import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._aio.awaited import blocking_on, read_regular

log = logging.getLogger("aiorpc_torch")

NAME = "aiorpc"
"""Name of any server, where none is needed."""

LOOK_INTERVAL = 5.0  # seconds between two looks at the files
LOOK_TIMEOUT = 0.5  # seconds for which a connection waits for a look
WARNING_TIME = 7 * 86400.0  # seconds before the end of a certificate
WARNING_INTERVAL = 86400.0  # seconds between two warnings of one file

_IGNORE_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which `ssl` has no name for

Path = str | os.PathLike[str]


class Files(NamedTuple):
    """The files of one certificate."""

    cert: Path
    key: Path
    ca: Path


class Loaded:
    """The content of the files. Raises ValueError if one cannot be used; it names the file."""

    def __init__(self, files: Files) -> None:
        for each in files:
            with reading(f"tls: {each}"):
                read_regular(each)  # OpenSSL does not tell which one is missing
        self.files = files
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, files)  # the end that was connected to
        # A ticket is never used, and one that is not read resets a connection as it is closed.
        self.server.num_tickets = 0
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, files)  # the end that connects
        self.ends = _ends(self.server, self.client, files)

    @property
    def expiry(self) -> str:
        """Return when the certificate expires, as text."""
        end = self.ends.get(os.fspath(self.files.cert))
        return "an unknown day" if end is None else _date(end)

    @property
    def expired(self) -> str:
        """Return which file has expired and when, "" if none has."""
        for file, end in self.ends.items():
            if end < time.time():
                return f"the certificate in {file} has expired on {_date(end)}: renew it"
        return ""

    def check(self) -> None:
        """Raise ValueError if others would refuse the certificate; it names the file."""
        if text := self.expired:
            raise ValueError(text)
        try:
            _prove(self.server, self.client)
        except ssl.SSLError as exc:
            raise ValueError(
                f"the certificate in {self.files.cert} is not valid with the authority in "
                f"{self.files.ca}: {reason_of(exc)}"
            ) from exc


class Certificate:
    """A certificate, as its files have it now. For any thread.

    Raises ValueError if a file cannot be used; it names the file.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._seen = _stamp(files)
        self.latest = Loaded(files)  # what was read last, and can be used
        self._next_look = time.monotonic() + LOOK_INTERVAL
        self._is_looking = False
        self._warned: dict[str, float] = {}  # time of the last warning, by file

    def loaded(self) -> Loaded:
        """Return the content for a new connection, after a look if one is due."""
        if time.monotonic() >= self._next_look:
            self.look(LOOK_TIMEOUT)
        return self.latest

    def look(self, wait: float = 0.0) -> None:
        """Read the files again if they have changed, in a thread; wait so many seconds for it."""
        if self._is_looking:  # their file system may hang
            return
        self._is_looking = True
        done = threading.Event()

        def work() -> None:
            try:
                self._look()
            finally:
                self._next_look = time.monotonic() + LOOK_INTERVAL
                self._is_looking = False
                done.set()

        try:
            threading.Thread(target=work, name="aiorpc-tls", daemon=True).start()
        except RuntimeError:  # the system has no more threads
            self._is_looking = False
        else:
            done.wait(wait)

    def _look(self) -> None:
        stamp = _stamp(self._files)
        if stamp != self._seen:
            try:
                loaded = Loaded(self._files)
                loaded.check()
            except ValueError as exc:
                if stamp == _stamp(self._files):  # else they are being written
                    self._seen = stamp
                    log.warning("%s. The worker uses the certificate that it has", exc)
            else:
                self._seen, self.latest = stamp, loaded
                log.info("tls: %s was read again: valid until %s", self._files.cert, loaded.expiry)
        self.warn()

    def warn(self) -> None:
        """Log a warning for each file that expires soon, once a day."""
        now = time.time()
        for file, end in self.latest.ends.items():
            is_told = now - self._warned.get(file, float("-inf")) < WARNING_INTERVAL
            if end - now < WARNING_TIME and not is_told:
                self._warned[file] = now
                log.warning(
                    "tls: the certificate in %s %s on %s. New connections are refused from then "
                    "on: renew the file, which is read again without a restart",
                    *(file, "expires" if now < end else "has expired", _date(end)),
                )


def _date(seconds: float) -> str:
    """Return a time as text."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _stamp(files: Files) -> tuple[object, ...]:
    """Return what differs once a file, or a link to it, was replaced or written."""
    found: list[object] = []
    for each in files:
        with contextlib.suppress(OSError):
            stat = os.stat(each)
            found.append((each, stat.st_mtime_ns, stat.st_ino, stat.st_size))
    return tuple(found)


def _context(side: int, files: Files) -> ssl.SSLContext:
    found = ssl.SSLContext(side)
    found.check_hostname = False
    found.verify_mode = ssl.CERT_REQUIRED
    found.minimum_version = ssl.TLSVersion.TLSv1_3
    with reading(f"tls: {files.ca}"):
        found.load_verify_locations(files.ca)
    with reading(f"tls: {files.cert} with the key in {files.key}"):
        found.load_cert_chain(files.cert, files.key, _no_password)
    return found


def _ends(server: ssl.SSLContext, client: ssl.SSLContext, files: Files) -> dict[str, float]:
    """Return when the certificate and the last authority expire, by file, as far as is known.

    `ssl` tells of a certificate only after a handshake.
    """
    found: dict[str, float] = {}
    try:
        for each in (server, client):
            each.verify_flags |= _IGNORE_TIME
        shown = _prove(server, client)
    except ssl.SSLError:  # `Loaded.check` tells
        return found
    finally:
        for each in (server, client):
            each.verify_flags &= ~_IGNORE_TIME
    found[os.fspath(files.cert)] = ssl.cert_time_to_seconds(shown["notAfter"])
    authorities = [
        ssl.cert_time_to_seconds(str(each["notAfter"])) for each in server.get_ca_certs()
    ]
    if authorities:
        found[os.fspath(files.ca)] = max(authorities)
    return found


def _prove(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """Connect both ends in memory; return what one shows. Raises SSLError if one is refused."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=NAME)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (near, far, near, far):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return far.getpeercert() or {}


def _no_password() -> str:
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise ValueError if a file of a certificate cannot be used; `what` names it."""
    try:
        with blocking_on(f"{what} does not answer: check its file system"):
            yield
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        if isinstance(exc, ssl.SSLError):
            reason = reason_of(exc)
        else:
            reason = getattr(exc, "strerror", None) or str(exc)
        raise ValueError(f"{what} cannot be used: {reason}") from exc


def reason_of(exc: ssl.SSLError) -> str:
    """Return what OpenSSL says, in words."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return exc.verify_message
    if not exc.reason:
        return "it is not in PEM format"
    return exc.reason.lower().replace("_", " ")


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
        self._certificate.loaded().check()
        self._certificate.warn()

    def look(self) -> None:
        """Read the files again soon, if they have changed; warn if the certificate ends soon."""
        self._certificate.look()

    @contextlib.contextmanager
    def explaining(self, peer: str) -> Iterator[None]:
        """Raise `TlsError` for errors of a connection with `peer`, which names the certificate."""
        try:
            yield
        except ssl.SSLError as exc:
            text = reason_of(exc)
            if isinstance(exc, ssl.SSLCertVerificationError):
                text = f"the certificate of {peer} is refused, by {self.ca}: {text}"
            elif "alert" in text:  # the other end tells
                until = f" (it expires on {self.expiry})" if "expired" in text else ""
                text = f"{peer} refuses the certificate in {self.cert}: {text}{until}"
            elif exc.reason in _NO_TLS:
                text = f"{peer} does not use TLS: give every worker tls="
            else:
                text = f"no TLS connection with {peer}: {text}"
            raise TlsError(text) from exc


_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "RECORD_LAYER_FAILURE")
