"""SIGTERM and Ctrl-C while a worker is in its world: an orderly end, and at once if asked twice.

Knows the signals of a process and asyncio's way with Ctrl-C, nothing of worlds.
"""

import asyncio
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """SIGTERM cancels the task that enters; the block left, it raises `SystemExit(143)`.

    Ctrl-C stays asyncio's, which cancels the main task; pressed again in the block, it ends the
    process at once. Where it is ignored, as by what a script starts in the background, it stays so.
    Only under `asyncio.run` in the main thread, and only where the program has no handlers of its
    own.
    """
    first = signal.getsignal(signal.SIGINT)
    is_ignored = first is signal.SIG_IGN
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not (is_ignored or _is_asyncios(first)):
        yield
        return
    with (
        _Terminable() as terminable,
        contextlib.nullcontext() if is_ignored else _twice_is_enough(first),
    ):
        yield
    del terminable


def _is_asyncios(handler: Any) -> bool:
    return isinstance(handler, functools.partial) and isinstance(
        getattr(handler.func, "__self__", None), asyncio.Runner
    )


class _Terminable:
    """SIGTERM cancels the task; leaving says so to the process's parent."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._is_ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        self._came = False

    def __enter__(self) -> "_Terminable":
        if self._is_ours:
            self._loop.add_signal_handler(signal.SIGTERM, self._terminate)
        return self

    def _terminate(self) -> None:
        self._came = True
        if self._task is not None:
            self._task.cancel("SIGTERM")

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        if self._is_ours:
            self._loop.remove_signal_handler(signal.SIGTERM)
        if self._came:
            raise SystemExit(128 + signal.SIGTERM) from exc


@contextlib.contextmanager
def _twice_is_enough(first: Any) -> Iterator[None]:
    presses = 0

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            end_at_once(128 + signal.SIGINT)
        first(number, frame)

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is press:
            signal.signal(signal.SIGINT, first)


def end_at_once(code: int) -> None:
    """End this process; its children hear of it by their pipes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
