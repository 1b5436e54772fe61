"""The files of a certificate: read again once they change, warned about before they expire."""

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from aiorpc_torch import Tls
from tests.support.certificates import Authority
from tests.support.logs import logged

SOON = 30.0


class Clock:
    """The clocks of this process, which a test moves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        for name in ("time", "monotonic"):
            patch.setattr(time, name, partial(self._read, getattr(time, name)))

    def _read(self, clock: Callable[[], float]) -> float:
        return clock() + self.ahead

    def look(self, tls: Tls) -> None:
        """Let the time pass after which the files are looked at, and wait for the look."""
        before = {*threading.enumerate()}
        self.ahead += 10.0  # they are looked at every 5 s, as a connection begins
        assert tls.client
        for thread in {*threading.enumerate()} - before:
            thread.join(SOON)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


Shown = Callable[[Tls, Tls], tuple[str, str]]


@pytest.fixture
def shown(clock: Clock) -> Shown:
    """Return a function that connects two ends: the names that they show each other."""

    def connect(tls: Tls, other: Tls) -> tuple[str, str]:
        for each in (tls, other):
            clock.look(each)
        return names_shown(tls, other)

    return connect


def names_shown(tls: Tls, other: Tls) -> tuple[str, str]:
    """Connect two ends by the sockets' own TLS; return the names that they show each other."""
    ours, theirs = socket.socketpair()
    found: list[str] = []

    def serve() -> None:
        with contextlib.suppress(OSError), theirs:
            with other.server.wrap_socket(theirs, server_side=True) as accepted:
                found.append(name_of(accepted))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ours, tls.client.wrap_socket(ours, server_hostname="x") as connected:
            found.insert(0, name_of(connected))
            connected.recv(1)
    finally:
        thread.join(SOON)
    own, far = found
    return far, own


def name_of(sock: ssl.SSLSocket) -> str:
    [[[_, name]]] = (sock.getpeercert() or {})["subject"]
    return str(name)


def copied(authority: Authority, name: str, to: Path) -> None:
    """Replace the files in a folder by those of another certificate, one after the other."""
    for source, target in zip(authority.files(name), ("cert", "key", "ca"), strict=True):
        shutil.copy(source, to / target)


@pytest.fixture
def folder(authority: Authority, tmp_path: Path) -> Path:
    found = tmp_path / "tls"
    found.mkdir()
    copied(authority, "first", found)
    return found


def tls_in(folder: Path) -> Tls:
    return Tls(*(folder / name for name in ("cert", "key", "ca")))


# ── renewal ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("security.renewal")
def test_files_that_are_written_again(authority: Authority, folder: Path, shown: Shown) -> None:
    """As certbot does. New connections have the new certificate, at both ends."""
    tls, other = tls_in(folder), authority.tls("other")
    assert shown(tls, other) == ("first", "other")
    copied(authority, "second", folder)
    assert shown(tls, other) == ("second", "other")
    copied(authority, "third", folder)
    assert shown(other, tls) == ("other", "third")


@pytest.mark.promise("security.renewal")
def test_a_link_that_is_replaced(
    authority: Authority, folder: Path, tmp_path: Path, shown: Shown
) -> None:
    """As Kubernetes does with a secret: all files change in one step."""
    link, other = tmp_path / "data", tmp_path / "new"
    link.symlink_to(folder)
    tls, peer = tls_in(link), authority.tls("other")
    assert shown(tls, peer) == ("first", "other")
    other.mkdir()
    copied(authority, "second", other)
    for name in os.listdir(folder):  # a kernel may tell the same times and sizes of both
        stat = os.stat(folder / name)
        os.utime(other / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (tmp_path / "next").symlink_to(other)
    (tmp_path / "next").rename(link)
    assert shown(tls, peer) == ("second", "other")


@pytest.mark.promise("security.renewal")
def test_another_authority(
    authority: Authority, folder: Path, tmp_path: Path, shown: Shown
) -> None:
    """Both in `ca` for a while, then the new one alone."""
    new = Authority(tmp_path, "new")
    tls, other = tls_in(folder), authority.tls("other")
    cert, key, _ = new.files("renewed")
    both = authority.ca.read_text() + new.ca.read_text()
    (folder / "ca").write_text(both)
    authority.ca.write_text(both)
    assert shown(tls, other) == ("first", "other")
    shutil.copy(cert, folder / "cert")
    shutil.copy(key, folder / "key")
    assert shown(tls, other) == ("renewed", "other")
    shutil.copy(new.ca, folder / "ca")
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(tls, other)


@pytest.mark.promise("security.renewal")
@pytest.mark.parametrize("wrong", ["half", "missing", "expired", "another authority"])
def test_files_that_do_not_fit(
    authority: Authority,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    shown: Shown,
    wrong: str,
) -> None:
    """The certificate stays, with one warning, until the files fit."""
    tls, other = tls_in(folder), authority.tls("other")
    match wrong:
        case "half":
            cert, _, _ = authority.files("second")
            shutil.copy(cert, folder / "cert")
            text = f"{folder}/cert with the key in {folder}/key cannot be used: key values mismatch"
        case "missing":
            (folder / "key").unlink()
            text = f"{folder}/key cannot be used: No such file"
        case "expired":
            expired = authority.expired()
            shutil.copy(expired.cert, folder / "cert")
            shutil.copy(expired.key, folder / "key")
            text = f"the certificate in {folder}/cert has expired on 20"
        case _:
            shutil.copy(Authority(tmp_path, "strange").ca, folder / "ca")
            text = f"the certificate in {folder}/cert is not valid with the authority in"
    for _ in range(3):
        assert shown(tls, other) == ("first", "other")
    [record] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert text in record.message
    assert record.message.endswith(". The worker uses the certificate that it has")
    copied(authority, "second", folder)
    assert shown(tls, other) == ("second", "other")


# ── the end of a certificate ────────────────────────────────────────────────────────────────────


@pytest.mark.promise("security.expiry")
def test_a_certificate_that_expires_soon(
    authority: Authority, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    """One warning a day names the file and the time; none before."""
    authority.tls("later", days=9).check()
    assert not logged(caplog)
    tls = authority.tls("soon", days=6)
    expected = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time.time() + 6 * 86400))
    tls.check()
    tls.check()
    assert tls.expiry[:10] == expected[:10]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"the certificate in {authority.folder}/soon.pem expires on {tls.expiry}." in (
        record.message
    )
    clock.ahead = 86401.0
    clock.look(tls)
    assert len(caplog.records) == 2
    clock.ahead = 7 * 86400.0
    clock.look(tls)
    assert "has expired on" in caplog.messages[2]


@pytest.mark.promise("security.expiry")
def test_a_renewed_certificate_ends_the_warnings(
    authority: Authority, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    tls = authority.tls(days=6)
    tls.check()
    authority.renew()
    clock.ahead = 2 * 86400.0
    for _ in range(3):
        clock.look(tls)
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1


def test_an_authority_that_has_expired(authority: Authority, clock: Clock) -> None:
    """Its file is named; openssl gives it 30 days."""
    tls = authority.tls(days=60)
    clock.ahead = 31 * 86400.0
    with pytest.raises(ValueError, match=rf"the certificate in {authority.ca} has expired on 20"):
        tls.check()


@pytest.mark.promise("security.expiry")
def test_whose_certificate_has_expired(authority: Authority) -> None:
    """The end that is told names its file and the time."""
    tls, expired = authority.tls(), authority.expired()
    error = ssl.SSLError(1, "")
    error.reason = "SSLV3_ALERT_CERTIFICATE_EXPIRED"
    text = rf"w1 refuses the certificate in .*expired\.pem: .* \(it expires on {expired.expiry}\)"
    with pytest.raises(OSError, match=text) as raised, expired.explaining("w1"):
        raise error
    assert not isinstance(raised.value, ssl.SSLError)
    assert f"expired.pem has expired on {expired.expiry}" in expired.expired
    assert tls.expired == ""


async def test_looks_block_no_loop(folder: Path) -> None:
    """A look that nobody waits for ends in its thread."""
    tls = tls_in(folder)
    copied_at = os.stat(folder / "cert").st_mtime_ns
    os.utime(folder / "cert", ns=(copied_at, copied_at + 10**9))
    before = tls.client
    tls.look()
    async with asyncio.timeout(SOON):
        while tls.client is before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
