"""Samples over sockets: of workers that answer, that do not, and of other users."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from aiorpc_torch._aio.sockets import BACKLOG, connect_unix, listen_unix
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
            viewer.sendall(data if isinstance(data, bytes) else json.dumps(data).encode() + b"\n")

    thread = threading.Thread(target=run, name="of-the-test")
    thread.start()
    return thread


def sample_of(prober: Prober, name: str, timeout: float = 60.0, **options: object) -> Sample | None:
    """Return the sample of one socket; other workers of this user may run beside the tests."""
    samples = prober.sample(timeout=timeout, **options)  # type: ignore[arg-type]
    return next((each for each in samples if each.key == name), None)


def test_an_answer(
    endpoint: tuple[str, socket.socket], prober: Prober, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiorpc_torch._top.probe.MEMORY_READS", 10_000)  # all that run beside it
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


# ── names that others choose ────────────────────────────────────────────────────────────────────


@pytest.mark.promise("security.text")
@pytest.mark.parametrize("end", ["\n", "a\nb", "\x1b[2Jx", "\u202ex", "x" * 61, "a b", ""])
def test_a_socket_with_another_name_is_no_worker(end: str, prober: Prober) -> None:
    """Its line of /proc/net/unix may have any form."""
    start = f"{PREFIX}{secrets.token_hex(8)}-"
    with listen_unix(f"{start}{end}"):
        assert not [each for each in prober.sample(timeout=0.0) if each.key.startswith(start)]


def fill(name: str, stack: contextlib.ExitStack) -> None:
    """Fill the backlog of a socket."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(2 * BACKLOG):
            stack.enter_context(connect_unix(name))


@pytest.fixture
def of_another_user() -> Iterator[Callable[..., str]]:
    """Makes sockets that a process of another user has; returns the name of the first."""
    if os.geteuid() != 0:
        pytest.skip("only root starts a process of another user")
    with contextlib.ExitStack() as stack:

        def make(*names: str) -> str:
            listen = f"[listen(s) for s in {[f'{chr(0)}{each}' for each in names]!r}]"
            program = f"""
import socket, sys
def listen(name):
    found = socket.socket(socket.AF_UNIX)
    found.bind(name)
    found.listen({BACKLOG})
    return found
kept = {listen}
print(flush=True)
sys.stdin.read()
"""
            process = subprocess.Popen(
                ["/usr/bin/env", "python3", "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                user=65534,
                cwd="/",
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdin is not None
            assert process.stdout is not None
            stack.callback(process.stdin.close)
            stack.callback(process.stdout.close)
            assert process.stdout.readline() == b"\n"
            return names[0]

        yield make


@pytest.mark.promise("security.text")
def test_another_user_is_never_shown(
    of_another_user: Callable[..., str], prober: Prober, endpoint: tuple[str, socket.socket]
) -> None:
    """Nor while its backlog is full, nor with a forged line that names a socket of this user."""
    name, _ = endpoint
    [own] = listening()[name]
    hidden = f"{PREFIX}{secrets.token_hex(8)}-of-another"
    forged = f"x\n0: 00000002 00000000 00010000 0001 01 {own} @{hidden}"
    of_another_user(hidden, forged)
    assert len(listening()[hidden]) == 2
    assert sample_of(prober, hidden, timeout=0.0) is None
    with contextlib.ExitStack() as stack, contextlib.closing(Prober()) as fresh:
        fill(hidden, stack)
        assert sample_of(fresh, hidden, timeout=0.0) is None
        assert sample_of(fresh, name, timeout=0.0) is not None


def test_an_own_worker_with_a_full_backlog_is_shown(
    endpoint: tuple[str, socket.socket], prober: Prober
) -> None:
    """It is stopped, say, and many have looked at it."""
    name, _ = endpoint
    with contextlib.ExitStack() as stack:
        fill(name, stack)
        found = sample_of(prober, name)
    assert found is not None
    assert (found.data, found.name, found.pid) == (None, "env:7", os.getpid())


@pytest.mark.promise("security.text")
def test_text_in_an_answer_is_printable(
    endpoint: tuple[str, socket.socket], prober: Prober
) -> None:
    name, listening_socket = endpoint
    thread = answer(listening_socket, {"name": "\x1b[2J", "lost": {"\n": ["\u202e"]}}, [])
    found = sample_of(prober, name)
    thread.join()
    assert found is not None
    assert found.data == {"name": r"\x1b[2J", "lost": {r"\n": [r"\u202e"]}}


@pytest.mark.parametrize("sent", [b"{\n", b"[" * 10**5 + b"\n", b"[1]\n", b"\xff\n"])
def test_nonsense_is_no_answer(
    endpoint: tuple[str, socket.socket], prober: Prober, sent: bytes
) -> None:
    name, listening_socket = endpoint
    thread = answer(listening_socket, sent, [])
    found = sample_of(prober, name)
    thread.join()
    assert found is not None
    assert found.data is None
