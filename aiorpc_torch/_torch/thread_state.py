"""Python's states of torch's threads: kept while the threads live, given back when they are gone.

Knows threads, nothing of torch's RPC.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch

_thread = threading.local()


def _python(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of Python's C interface, called with the GIL held."""
    found = ctypes.pythonapi[name]
    found.restype, found.argtypes = result, arguments
    return found


_ensure = _python("PyGILState_Ensure", ctypes.c_int)
_current = _python("PyThreadState_Get", ctypes.c_void_p)
_clear = _python("PyThreadState_Clear", None, ctypes.c_void_p)
_delete = _python("PyThreadState_Delete", None, ctypes.c_void_p)


class _Mark:
    """Thread-local, so it is there as long as the state is that holds it."""


class _Kept(NamedTuple):
    """A state that was kept."""

    thread: int  # Linux's number
    address: int
    mark: ref[_Mark]


_kept: list[_Kept] = []

_THREADS = "/proc/self/task"


def keep_state() -> None:
    """Let this thread, which Python did not start, keep its Python state until it ends.

    torch's threads make a thread state whenever they enter Python and drop it when they leave,
    several times a call: of a lone call of 450 µs it is 100 (torch 2.13 and 2.15, Python 3.11). A
    reference that is never given back keeps it, and with it what is thread-local. When the thread
    has ended, `give_back` frees it, which is 20 KB.
    """
    if not hasattr(_thread, "mark"):
        _ensure()
        mark = _thread.mark = _Mark()
        _kept.append(_Kept(threading.get_native_id(), _current(), ref(mark)))


def give_back() -> None:
    """Free the states of threads that have ended. Blocks, for less than a millisecond."""
    ended = [each for each in [*_kept] if not os.path.exists(f"{_THREADS}/{each.thread}")]
    if ended and os.path.isdir(_THREADS):  # elsewhere nobody says which threads there are
        # In a thread that does nothing else: with each state that is deleted, Python 3.12 forgets
        # which one the deleting thread has, and C code there that asks for one waits for itself.
        thread = threading.Thread(target=lambda: _free(ended), name="aiorpc-states", daemon=True)
        thread.start()
        thread.join()


def kept_states() -> int:
    """How many are kept; those that are yet to be given back are among them."""
    return len(_kept)


def _free(ended: list[_Kept]) -> None:
    for each in ended:
        with contextlib.suppress(ValueError):  # somebody else does the same
            _kept.remove(each)
            # A thread that Python started, and in which a future came to be done, took it along.
            if each.mark() is not None:
                _clear(each.address)
                _delete(each.address)


def tune(intra_op: int) -> None:
    """Tell this thread torch's intra-op thread count, once.

    A thread that was never told opens an OpenMP team of its own for each operator: a 64-row MLP
    took 18 ms in place of 0.1 (torch 2.13, two cores).
    """
    if getattr(_thread, "intra_op", None) != intra_op:
        torch.set_num_threads(intra_op)
        _thread.intra_op = intra_op
