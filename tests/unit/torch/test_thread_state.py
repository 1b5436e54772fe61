"""Pinned Python states of threads that Python did not start: freed when the threads have ended."""

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from aiorpc_torch._torch import thread_state
from aiorpc_torch._torch.thread_state import (
    free_dead_thread_states,
    pin_thread_state,
    thread_settings,
)

SOON = 30.0  # seconds after which something will never happen

_libc = ctypes.CDLL(None)
_Body = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class Foreign:
    """A thread of C's that runs a Python function, as torch's do."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._body = _Body(lambda _: function())
        self._thread = ctypes.c_ulong()
        assert _libc.pthread_create(ctypes.byref(self._thread), None, self._body, None) == 0

    def join(self) -> None:
        assert _libc.pthread_join(self._thread, None) == 0


class Python(threading.Thread):
    """One of Python's own."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__(target=function)
        self.start()


class Mark:
    """A thread-local object: it lives as long as the state of its thread."""


class Life:
    """A thread that pins its state, twice, and waits for the gate."""

    def __init__(self, kind: type[Foreign] | type[Python]) -> None:
        self.gate, self.kept = threading.Event(), threading.Event()
        self.local = threading.local()
        self.thread = kind(self._live)
        assert self.kept.wait(SOON)

    def _live(self) -> None:
        pin_thread_state()
        pin_thread_state()
        self.local.mark = mark = Mark()
        self.mark = weakref.ref(mark)
        self.kept.set()
        assert self.gate.wait(SOON)

    def end(self) -> None:
        self.gate.set()
        self.thread.join()


_others = [0]  # states of threads that other tests have left alive in this process


def pinned_states() -> int:
    return len(thread_state.pinned) - _others[0]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    free_dead_thread_states()
    _others[0] = len(thread_state.pinned)
    yield
    end = time.monotonic() + SOON
    while pinned_states() and time.monotonic() < end:  # a joined thread is not quite gone yet
        free_dead_thread_states()
    assert pinned_states() == 0


def test_a_state_is_pinned_until_its_thread_has_ended() -> None:
    """Also what is thread-local; `free_dead_thread_states` then frees both."""
    lives = [Life(Foreign) for _ in range(5)]
    free_dead_thread_states()
    assert pinned_states() == 5
    for life in lives[:3]:
        life.end()
    assert all(life.mark() is not None for life in lives)
    free_dead_thread_states()
    assert [life.mark() is None for life in lives] == [True, True, True, False, False]
    assert pinned_states() == 2
    for life in lives[3:]:
        life.end()
    free_dead_thread_states()
    assert not any(life.mark() for life in lives)


def test_python_frees_the_states_of_its_own_threads() -> None:
    """A torch future may complete in such a thread: nothing is freed twice."""
    for _ in range(20):
        lives = [Life(kind) for kind in (Python, Foreign, Python)]
        for life in lives:
            life.end()
        assert [life.mark() is None for life in lives] == [True, False, True]
        free_dead_thread_states()
        assert lives[1].mark() is None


def test_a_state_is_freed_once() -> None:
    """Several threads may free states at once."""
    lives = [Life(Foreign) for _ in range(20)]
    for life in lives:
        life.end()
    threads = [threading.Thread(target=free_dead_thread_states) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pinned_states() == 0
    assert not any(life.mark() for life in lives)


def test_the_thread_that_frees_states_keeps_its_own() -> None:
    """C code there may ask for its state; in Python 3.12 a deletion in that thread forgets it."""
    life = Life(Foreign)
    life.end()
    free_dead_thread_states()
    seen: list[int] = []
    ctypes.CFUNCTYPE(None, ctypes.c_int)(seen.append)(1)  # as a thread of C's calls in
    assert seen == [1]


# ── settings ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("is_initialized", "device", "expected"), [(True, 1, [1]), (True, 0, []), (False, 1, [])]
)
def test_threads_get_the_device_of_the_thread_that_enters_the_world(
    monkeypatch: pytest.MonkeyPatch, is_initialized: bool, device: int, expected: list[int]
) -> None:
    """Unless it is torch's default, which needs no CUDA."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    settings, counts = thread_settings(), list[int]()

    def note() -> None:
        settings()
        counts.append(torch.get_num_threads())

    Python(note).join()
    assert found == expected
    assert counts == [torch.get_num_threads()]


def test_threads_of_another_pid_namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where `/proc` is that of another PID namespace, no state of a living thread is freed."""
    life = Life(Foreign)
    with monkeypatch.context() as changed:
        changed.setattr(thread_state, "_THREADS", str(tmp_path))
        free_dead_thread_states()
    assert life.mark() is not None
    life.end()
