"""Event loops: the fastest one there is, and steps on one from whatever thread."""

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .fork import check_not_forked

T = TypeVar("T")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
"""A function or class that makes an event loop."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop where it is installed, else asyncio's."""
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def call_soon(loop: asyncio.AbstractEventLoop, step: Callable[..., object], *args: Any) -> None:
    """Schedule `step(*args)` on its loop, unless the loop is closed. In any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(step, *args)


def run_on_loop(loop: asyncio.AbstractEventLoop, step: Callable[..., object], *args: Any) -> None:
    """Run `step(*args)` now if this is its loop's thread, otherwise schedule it."""
    if asyncio._get_running_loop() is loop:
        step(*args)
    else:
        call_soon(loop, step, *args)


async def await_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Return `await coroutine`, run on `loop`, whichever loop runs here.

    Raises:
        NotInWorld: if this process is a fork of a worker's, where no loop of the worker runs.
    """
    if asyncio.get_running_loop() is loop:
        return await coroutine
    try:
        check_not_forked()
        running = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:  # that loop is closed
        coroutine.close()
        raise
    return await asyncio.wrap_future(running)
