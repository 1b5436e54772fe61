"""When the files of a certificate are looked at: by one thread, which delays no connection."""

import logging
import shutil
import threading
import time
from pathlib import Path

import pytest

from aiorpc_torch._port import tls as module
from tests.support.certificates import Authority

from .test_certificates import SOON, authority, folder, names_shown, tls_in

__all__ = ["authority", "folder"]


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_INTERVAL", 0.0)
    monkeypatch.setattr(module, "LOOK_TIMEOUT", SOON)


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
    loaded, reads = module.Loaded, list[bool]()

    def load(files: module.Files) -> module.Loaded:
        try:
            return loaded(files)
        finally:
            if not reads:
                shutil.copy(key, folder / "key")
            reads.append(True)

    monkeypatch.setattr(module, "Loaded", load)
    assert names_shown(tls, other) == ("first", "other")
    assert names_shown(tls, other) == ("second", "other")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_files_are_not_read_for_each_connection(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, looks = tls_in(folder), list[object]()
    tls.check()
    monkeypatch.setattr(module, "LOOK_INTERVAL", SOON)
    monkeypatch.setattr(module, "_stamp", lambda files: looks.append(files) or ())
    monkeypatch.setattr(module.Certificate, "_seen", (), raising=False)
    for _ in range(3):
        assert tls.client is tls.client
    assert len(looks) <= 2


@pytest.mark.promise("worlds.place")
def test_a_file_system_that_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first connection waits for a moment, further ones not at all; one thread waits."""
    tls = tls_in(folder)
    client, answers = tls.client, threading.Event()
    looks, begun = list[object](), threading.Event()

    def hang(files: module.Files) -> tuple[object, ...]:
        looks.append(files)
        begun.set()
        assert answers.wait(SOON)
        return ()

    monkeypatch.setattr(module, "_stamp", hang)
    monkeypatch.setattr(module, "LOOK_TIMEOUT", 0.1)
    begin = time.monotonic()
    for _ in range(100):
        assert tls.client is client
    assert time.monotonic() - begin < 5.0
    assert begun.wait(SOON)
    assert len(looks) == 1
    answers.set()
