"""SIGTERM and Ctrl-C in a worker: graceful at first, and a forced exit at the second Ctrl-C."""

import asyncio
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def graceful_signals(wanted: bool = True) -> Iterator[None]:
    """Let SIGTERM cancel the current task; after the block, raise `SystemExit(143)`.

    The first Ctrl-C stays asyncio's, which cancels the main task; the second one in the block ends
    the process at once. An ignored SIGINT, as of a script's background process, stays ignored.
    Nothing changes outside `asyncio.run` in the main thread, or if the program has handlers.

    Args:
        wanted: False leaves all handlers as they are.
    """
    previous = signal.getsignal(signal.SIGINT)
    is_ignored = previous is signal.SIG_IGN
    in_main = threading.current_thread() is threading.main_thread()
    if not wanted or not in_main or not (is_ignored or _is_asyncios(previous)):
        yield
        return
    ctrl_c = contextlib.nullcontext() if is_ignored else _second_ctrl_c_exits(previous)
    with _SigtermCancels(), ctrl_c:
        yield


def _is_asyncios(handler: Any) -> bool:
    # asyncio.Runner's handler is a partial of its method, which is private to CPython 3.11 and
    # 3.12. (tests/integration/test_signals.py::test_a_second_interrupt_ends_at_once)
    return isinstance(handler, functools.partial) and isinstance(
        getattr(handler.func, "__self__", None), asyncio.Runner
    )


class _SigtermCancels:
    """A block in which SIGTERM cancels the task, and which then raises `SystemExit(143)`."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._has_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        self._was_received = False

    def __enter__(self) -> None:
        if self._has_default:
            self._loop.add_signal_handler(signal.SIGTERM, self._terminate)

    def _terminate(self) -> None:
        self._was_received = True
        if self._task is not None:
            self._task.cancel("SIGTERM")

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        if self._has_default:
            self._loop.remove_signal_handler(signal.SIGTERM)
        if self._was_received:
            raise SystemExit(128 + signal.SIGTERM) from exc


@contextlib.contextmanager
def _second_ctrl_c_exits(previous: Any) -> Iterator[None]:
    count = 0

    def on_sigint(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            force_exit(128 + signal.SIGINT)
        previous(number, frame)

    signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is on_sigint:
            signal.signal(signal.SIGINT, previous)


def force_exit(code: int) -> None:
    """End this process without cleanup; its children notice that their pipes close."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
