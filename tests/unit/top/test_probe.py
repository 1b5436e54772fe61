"""Samples over sockets: of workers that answer, that do not, and of other users."""

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator

import pytest

from aiorpc_torch._aio.unix_sockets import listen_unix
from aiorpc_torch._inspection.snapshot_socket import PREFIX
from aiorpc_torch._top import probe
from aiorpc_torch._top.probe import Prober, Sample, listening


@pytest.fixture
def endpoint() -> Iterator[tuple[str, socket.socket]]:
    """A worker's socket, at which nothing answers yet."""
    name = f"{PREFIX}{secrets.token_hex(8)}-env:7"
    with listen_unix(name) as listening_socket:
        listening_socket.setblocking(True)
        yield name, listening_socket


@pytest.fixture
def prober() -> Iterator[Prober]:
    with contextlib.closing(Prober()) as found:
        yield found


def answer(listening_socket: socket.socket, data: object, got: list[bytes]) -> threading.Thread:
    """Answer one request in a thread."""

    def run() -> None:
        viewer, _ = listening_socket.accept()
        with viewer:
            got.append(viewer.recv(1024))
            viewer.sendall(json.dumps(data).encode() + b"\n")

    thread = threading.Thread(target=run, name="of-the-test")
    thread.start()
    return thread


def sample_of(prober: Prober, name: str, timeout: float = 60.0, **options: object) -> Sample | None:
    """Return the sample of one socket; other workers of this user may run beside the tests."""
    samples = prober.sample(timeout=timeout, **options)  # type: ignore[arg-type]
    return next((each for each in samples if each.key == name), None)


def test_an_answer(endpoint: tuple[str, socket.socket], prober: Prober) -> None:
    name, listening_socket = endpoint
    got: list[bytes] = []
    for detail in ((), (name,)):
        thread = answer(listening_socket, {"name": "env:7"}, got)
        found = sample_of(prober, name, detail=detail)
        thread.join()
        assert found is not None
        assert (found.data, found.name, found.pid) == ({"name": "env:7"}, "env:7", os.getpid())
        assert found.memory > 1 << 20
    assert [each.strip() for each in got] == [b"brief", b"detail"]


def test_a_process_that_does_not_answer_is_waited_for_once(
    endpoint: tuple[str, socket.socket], prober: Prober
) -> None:
    """Its request stays under way: it gets one, and answers that one when it goes on."""
    name, listening_socket = endpoint
    first = sample_of(prober, name, timeout=0.01)
    assert first is not None
    assert first.data is None
    again = sample_of(prober, name, timeout=1000.0)  # it does not take 1000 s
    assert again is not None
    assert again.silent > first.silent > 0.0
    got: list[bytes] = []
    thread = answer(listening_socket, {"name": "env:7"}, got)
    thread.join()
    found = sample_of(prober, name)
    assert found is not None
    assert found.data == {"name": "env:7"}
    assert len(got) == 1


def test_a_socket_that_is_gone_has_no_sample(
    endpoint: tuple[str, socket.socket], prober: Prober
) -> None:
    name, listening_socket = endpoint
    assert name in listening()
    assert sample_of(prober, name, timeout=0.0) is not None
    listening_socket.close()
    assert name not in listening()
    assert sample_of(prober, name, timeout=0.0) is None


def test_a_broken_answer_is_none(endpoint: tuple[str, socket.socket], prober: Prober) -> None:
    name, listening_socket = endpoint
    thread = answer(listening_socket, {"error": "KeyError('x')"}, [])
    found = sample_of(prober, name)
    thread.join()
    assert found is not None
    assert found.data is None


def test_other_users_are_not_asked(
    endpoint: tuple[str, socket.socket], prober: Prober, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, listening_socket = endpoint
    monkeypatch.setattr(probe, "is_same_user", lambda _: False)
    assert sample_of(prober, name) is None
    viewer, _ = listening_socket.accept()
    with viewer:
        assert viewer.recv(1024) == b""
