"""Python's states of threads that Python did not start: kept while they live, and no longer."""

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from aiorpc_torch._torch import thread_state
from aiorpc_torch._torch.thread_state import give_back, keep_state

SOON = 10.0  # seconds after which something will never happen

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
    """Is there as long as the state of the thread that holds it."""


class Life:
    """A thread that keeps its state, twice, and waits for the gate."""

    def __init__(self, kind: type[Foreign] | type[Python]) -> None:
        self.gate, self.kept = threading.Event(), threading.Event()
        self.local = threading.local()
        self.thread = kind(self._live)
        assert self.kept.wait(SOON)

    def _live(self) -> None:
        keep_state()
        keep_state()
        self.local.mark = mark = Mark()
        self.mark = weakref.ref(mark)
        self.kept.set()
        assert self.gate.wait(SOON)

    def end(self) -> None:
        self.gate.set()
        self.thread.join()


_others = [0]  # states of threads that other tests have left alive in this process


def kept_states() -> int:
    return thread_state.kept_states() - _others[0]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    give_back()
    _others[0] = thread_state.kept_states()
    yield
    end = time.monotonic() + SOON
    while kept_states() and time.monotonic() < end:  # a joined thread is not quite gone yet
        give_back()
    assert kept_states() == 0


def test_a_state_is_kept_until_its_thread_has_ended() -> None:
    """And with it what is thread-local; then both are freed, when that is asked for."""
    lives = [Life(Foreign) for _ in range(5)]
    give_back()
    assert kept_states() == 5
    for life in lives[:3]:
        life.end()
    assert all(life.mark() is not None for life in lives)
    give_back()
    assert [life.mark() is None for life in lives] == [True, True, True, False, False]
    assert kept_states() == 2
    for life in lives[3:]:
        life.end()
    give_back()
    assert not any(life.mark() for life in lives)


def test_python_frees_the_states_of_its_own_threads() -> None:
    """A torch future may be done in one of those: nothing is freed twice."""
    for _ in range(20):
        lives = [Life(kind) for kind in (Python, Foreign, Python)]
        for life in lives:
            life.end()
        assert [life.mark() is None for life in lives] == [True, False, True]
        give_back()
        assert lives[1].mark() is None


def test_a_state_is_freed_once() -> None:
    """However many threads give back at a time."""
    lives = [Life(Foreign) for _ in range(20)]
    for life in lives:
        life.end()
    threads = [threading.Thread(target=give_back) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept_states() == 0
    assert not any(life.mark() for life in lives)


def test_the_thread_that_gives_back_goes_on() -> None:
    """It may call C that asks for its state: in Python 3.12 that would be the one that is gone."""
    life = Life(Foreign)
    life.end()
    give_back()
    seen: list[int] = []
    ctypes.CFUNCTYPE(None, ctypes.c_int)(seen.append)(1)  # as a thread of C's calls in
    assert seen == [1]
