"""Steps on an event loop, from whatever thread."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any


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
