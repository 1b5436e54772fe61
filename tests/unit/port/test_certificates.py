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
from pathlib import Path

import pytest

from aiorpc_torch._port import certificates
from aiorpc_torch._port.tls import Tls, TlsError
from tests.support.certificates import Authority
from tests.support.logs import logged

SOON = 30.0


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "LOOK_INTERVAL", 0.0)
    monkeypatch.setattr(certificates, "LOOK_TIMEOUT", SOON)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def shown(tls: Tls, other: Tls) -> tuple[str, str]:
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
def test_files_that_are_written_again(authority: Authority, folder: Path) -> None:
    """As certbot does. New connections have the new certificate, at both ends."""
    tls, other = tls_in(folder), authority.tls("other")
    assert shown(tls, other) == ("first", "other")
    copied(authority, "second", folder)
    assert shown(tls, other) == ("second", "other")
    copied(authority, "third", folder)
    assert shown(other, tls) == ("other", "third")


@pytest.mark.promise("security.renewal")
def test_a_link_that_is_replaced(authority: Authority, folder: Path, tmp_path: Path) -> None:
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
def test_another_authority(authority: Authority, folder: Path, tmp_path: Path) -> None:
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


def test_files_that_are_being_written(
    authority: Authority,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What changes while it is read is read again, without a warning."""
    tls, other = tls_in(folder), authority.tls("other")
    cert, key, _ = authority.files("second")
    shutil.copy(cert, folder / "cert")
    of, reads = certificates.Loaded.of, list[bool]()

    def load(files: certificates.Files) -> certificates.Loaded:
        try:
            return of(files)
        finally:
            if not reads:
                shutil.copy(key, folder / "key")
            reads.append(True)

    monkeypatch.setattr(certificates.Loaded, "of", load)
    assert shown(tls, other) == ("first", "other")
    assert shown(tls, other) == ("second", "other")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_files_are_not_read_for_each_connection(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, looks = tls_in(folder), list[object]()
    tls.check()
    monkeypatch.setattr(certificates, "LOOK_INTERVAL", SOON)
    monkeypatch.setattr(certificates, "_stamp", lambda files: looks.append(files) or ())
    monkeypatch.setattr(certificates.Certificate, "_seen", (), raising=False)
    for _ in range(3):
        assert tls.client is tls.client
    assert len(looks) <= 2


@pytest.mark.promise("worlds.place")
def test_a_file_system_that_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first connection waits for a moment, further ones not at all; one thread waits."""
    tls = tls_in(folder)
    client, answers = tls.client, threading.Event()
    looks, begun = list[object](), threading.Event()

    def hang(files: certificates.Files) -> tuple[object, ...]:
        looks.append(files)
        begun.set()
        assert answers.wait(SOON)
        return ()

    monkeypatch.setattr(certificates, "_stamp", hang)
    monkeypatch.setattr(certificates, "LOOK_TIMEOUT", 0.1)
    begin = time.monotonic()
    for _ in range(100):
        assert tls.client is client
    assert time.monotonic() - begin < 5.0
    assert begun.wait(SOON)
    assert len(looks) == 1
    answers.set()


# ── the end of a certificate ────────────────────────────────────────────────────────────────────


@pytest.mark.promise("security.expiry")
def test_a_certificate_that_expires_soon(
    authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
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
    now = time.time()
    monkeypatch.setattr(certificates.time, "time", lambda: now + 86401)
    assert tls.client
    assert len(caplog.records) == 2
    monkeypatch.setattr(certificates.time, "time", lambda: now + 7 * 86400)
    assert tls.client
    assert "has expired on" in caplog.messages[2]


@pytest.mark.promise("security.expiry")
def test_a_renewed_certificate_ends_the_warnings(
    authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = authority.tls(days=6)
    tls.check()
    authority.renew()
    now = time.time()
    monkeypatch.setattr(certificates.time, "time", lambda: now + 2 * 86400)
    for _ in range(3):
        assert tls.client
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1


def test_an_authority_that_has_expired(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is named; openssl gives it 30 days."""
    tls, now = authority.tls(days=60), time.time()
    monkeypatch.setattr(certificates.time, "time", lambda: now + 31 * 86400)
    with pytest.raises(ValueError, match=rf"the certificate in {authority.ca} has expired on 20"):
        tls.check()


@pytest.mark.promise("security.expiry")
def test_whose_certificate_has_expired(authority: Authority) -> None:
    """The end that is told names its file and the time."""
    tls, expired = authority.tls(), authority.expired()
    error = ssl.SSLError(1, "")
    error.reason = "SSLV3_ALERT_CERTIFICATE_EXPIRED"
    text = rf"w1 refuses the certificate in .*expired\.pem: .* \(it expires on {expired.expiry}\)"
    with pytest.raises(TlsError, match=text), expired.explaining("w1"):
        raise error
    assert f"expired.pem has expired on {expired.expiry}" in expired.expired
    assert tls.expired == ""


async def test_looks_block_no_loop(folder: Path) -> None:
    """A look that nobody waits for ends in its thread."""
    tls = tls_in(folder)
    copied_at = os.stat(folder / "cert").st_mtime_ns
    os.utime(folder / "cert", ns=(copied_at, copied_at + 10**9))
    before = tls._certificate.latest
    tls.look()
    async with asyncio.timeout(SOON):
        while tls._certificate.latest is before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
