"""The end of a process while threads of the library run, say in a plain `def` that computes.

Until CPython 3.13, Python unwinds a thread that returns to it after its end. A torch operator
cannot be unwound, so C++ aborts the process: "terminate called without an active exception", code
134. In CPython 3.14 such a thread hangs until the process has ended, and so it does here. Nothing
is raised in the thread, which may hold a lock that an exit function needs, say a log handler's.
Python code that C++ has called, such as a custom backward, is not protected: the frames of C++
around it are unwound. (tests/unit/aio/test_process_exit.py)
"""

import contextlib
import ctypes
import threading


def has_threads() -> bool:
    """Return whether a thread of the library runs."""
    return any(each.name.startswith("aiorpc-") for each in threading.enumerate())


def abandon_threads() -> None:
    """Let this process end beside its threads, as it would without them.

    Call it from an exit function. Python ends as usual: exit functions, streams, exit code. C++'s
    exit functions do not run: they free what the threads use, and join threads of torch.
    """
    # Linux with glibc and libstdc++; elsewhere the process ends as it may.
    with contextlib.suppress(OSError, AttributeError):
        libc, cxx = ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6")
        set_terminate = cxx["_ZSt13set_terminatePFvvE"]
        set_terminate(ctypes.cast(libc.pause, ctypes.c_void_p))
        # The last one runs first: C's streams are flushed, then the process ends with its code.
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)
