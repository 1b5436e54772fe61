"""Ends of this process: SIGTERM, Ctrl-C, a forced exit, and an exit beside threads that run."""

import asyncio
import atexit
import contextlib
import ctypes
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

log = logging.getLogger("aiorpc_torch")


@contextlib.contextmanager
def graceful_signals(
    wanted: bool = True, on_stop: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Let SIGTERM cancel the current task, once; after the block, raise `SystemExit(143)`.

    The first Ctrl-C stays asyncio's, which cancels the main task; the second one in the block ends
    the process at once. An ignored SIGINT, as of a script's background process, stays ignored.
    Nothing changes outside `asyncio.run` in the main thread, or if the program has handlers.

    Args:
        wanted: False leaves all handlers as they are.
        on_stop: Is called at SIGTERM and Ctrl-C, before the task is cancelled.
    """
    previous = signal.getsignal(signal.SIGINT)
    is_ignored = previous is signal.SIG_IGN
    # asyncio.Runner's handler is a partial of its method, which is private to CPython 3.11 to
    # 3.14. (tests/integration/test_signals.py::test_a_second_interrupt_ends_at_once)
    method = previous.func if isinstance(previous, functools.partial) else None
    is_asyncios = isinstance(getattr(method, "__self__", None), asyncio.Runner)
    in_main = threading.current_thread() is threading.main_thread()
    if not wanted or not in_main or not (is_ignored or is_asyncios):
        yield
        return
    ctrl_c = contextlib.nullcontext() if is_ignored else _second_ctrl_c_exits(previous, on_stop)
    with _sigterm_cancels(on_stop), ctrl_c:
        yield


_is_sigterm_ours = False
_masks: dict[int, set[int]] = {}  # the signal masks of threads that fork


def _before_fork() -> None:
    # Until a fork has its own handler, this process would get the signal: they share a descriptor.
    if _is_sigterm_ours:
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    if (mask := _masks.pop(threading.get_ident(), None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Let SIGTERM end a fork of this process, whose event loop does not run."""
    if _is_sigterm_ours:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)


@contextlib.contextmanager
def _sigterm_cancels(on_stop: Callable[[], object]) -> Iterator[None]:
    """Let SIGTERM cancel the task in this block, which then raises `SystemExit(143)`."""
    global _is_sigterm_ours
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    has_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    was_received = False

    def terminate() -> None:
        nonlocal was_received
        if was_received:  # a second one must not end the program's own clean-up
            return
        was_received = True
        log.info("SIGTERM: process %d ends its block, and leaves its world", os.getpid())
        on_stop()
        if task is not None:
            task.cancel("SIGTERM")

    if has_default:
        loop.add_signal_handler(signal.SIGTERM, terminate)
        _is_sigterm_ours = True
    try:
        yield
    finally:
        if has_default:
            loop.remove_signal_handler(signal.SIGTERM)
            _is_sigterm_ours = False
        if was_received:
            raise SystemExit(128 + signal.SIGTERM) from sys.exc_info()[1]


@contextlib.contextmanager
def _second_ctrl_c_exits(previous: Any, on_stop: Callable[[], object]) -> Iterator[None]:
    count = 0
    loop = asyncio.get_running_loop()

    def on_sigint(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            force_exit(128 + signal.SIGINT)
        loop.call_soon_threadsafe(on_stop)
        previous(signum, frame)

    signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is on_sigint:
            signal.signal(signal.SIGINT, previous)


def end_process(code: int) -> NoReturn:
    """End this process as `multiprocessing` ends a forked child.

    Exit functions run and streams are flushed, but the interpreter is not finalized. With torch
    that would take a second of every core.
    """
    atexit._run_exitfuncs()
    force_exit(code)


def exit_code(exc: BaseException) -> int:
    """Return the exit code of a process that an exception ends; print what Python prints."""
    if not isinstance(exc, SystemExit):
        sys.excepthook(type(exc), exc, exc.__traceback__)
        return 1
    if exc.code is None or isinstance(exc.code, int):
        return exc.code or 0
    sys.stderr.write(f"{exc.code}\n")
    return 1


def force_exit(code: int) -> NoReturn:
    """End this process without cleanup; its children notice that their pipes close."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def has_threads() -> bool:
    """Return whether a thread of the library runs."""
    return any(each.name.startswith("aiorpc-") for each in threading.enumerate())


def abandon_threads() -> None:
    """Let this process end beside threads of the library, say in a plain `def` that computes.

    Until CPython 3.13, Python unwinds a thread that returns to it after its end. A torch operator
    cannot be unwound, so C++ aborts the process: "terminate called without an active exception",
    code 134. In CPython 3.14 such a thread hangs until the process has ended, and so it does here.
    Nothing is raised in the thread, which may hold a lock that an exit function needs, say a log
    handler's. Python code that C++ has called, such as a custom backward, is not protected: the
    frames of C++ around it are unwound. (tests/unit/aio/test_process_exit.py)

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
