"""Python's thread states in torch's threads, and torch's intra-op thread count in ours.

The four functions of Python's C interface are those of CPython 3.11 to 3.14.
(tests/unit/torch/test_thread_state.py)
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
    """Return a function of Python's C interface, which is called with the GIL held."""
    found = ctypes.pythonapi[name]
    found.restype, found.argtypes = result, arguments
    return found


_ensure = _python("PyGILState_Ensure", ctypes.c_int)
_current = _python("PyThreadState_Get", ctypes.c_void_p)
_clear = _python("PyThreadState_Clear", None, ctypes.c_void_p)
_delete = _python("PyThreadState_Delete", None, ctypes.c_void_p)


class _Mark:
    """A thread-local object: it lives as long as the thread state that holds it."""


class _Pinned(NamedTuple):
    """A pinned thread state."""

    thread: int  # Linux's thread id
    address: int
    mark: ref[_Mark]


pinned: list[_Pinned] = []
"""The pinned states, those of dead threads included."""

_THREADS = "/proc/self/task"


def pin_thread_state() -> None:
    """Keep the Python thread state of this thread, which torch started, until the thread ends.

    torch's threads make a state whenever they enter Python and drop it when they leave, several
    times a call: 100 µs of a lone call of torch RPC (torch 2.13, 2.15, Python 3.11). One more
    reference keeps the state and what is thread-local. `free_dead_thread_states` frees its 20 KB.
    """
    if not hasattr(_thread, "mark"):
        _ensure()
        mark = _thread.mark = _Mark()
        pinned.append(_Pinned(threading.get_native_id(), _current(), ref(mark)))


def free_dead_thread_states() -> None:
    """Free the pinned states of threads that have ended. Blocks for less than a millisecond."""
    # Without /proc, or with that of another PID namespace, dead threads are unknown: none is freed.
    if not _is_listed(threading.get_native_id()):
        return
    if ended := [each for each in [*pinned] if not _is_listed(each.thread)]:
        # In a thread of its own: when Python 3.12 deletes a state, the deleting thread forgets its
        # own one, and C code there that asks for one deadlocks.
        thread = threading.Thread(target=lambda: _free(ended), name="aiorpc-states", daemon=True)
        thread.start()
        thread.join()


def _is_listed(thread: int) -> bool:
    return os.path.exists(f"{_THREADS}/{thread}")


def _free(ended: list[_Pinned]) -> None:
    for each in ended:
        with contextlib.suppress(ValueError):  # another thread frees it
            pinned.remove(each)
            # Python itself freed the state, mark included, if it had started the thread.
            if each.mark() is not None:
                _clear(each.address)
                _delete(each.address)


def thread_settings() -> Callable[[], None]:
    """Return a function that gives a thread torch's settings of the current one.

    They are the intra-op thread count and the current CUDA device, which a thread otherwise has
    from torch's defaults. (The device only if it was set by now, so that CUDA stays uninitialized.)
    """
    count = torch.get_num_threads()
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if has_cuda else 0

    def apply() -> None:
        set_intra_op_threads(count)
        if device:
            torch.cuda.set_device(device)

    return apply


def set_intra_op_threads(count: int) -> None:
    """Set torch's intra-op thread count in this thread, if it is not set yet.

    A thread without it opens an OpenMP team for each operator: a 64-row MLP took 18 ms in place of
    0.1 (torch 2.13, two cores).
    """
    if getattr(_thread, "intra_op", None) != count:
        torch.set_num_threads(count)
        _thread.intra_op = count
