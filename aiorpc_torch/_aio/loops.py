"""Steps on an event loop, from whatever thread."""

import asyncio
import contextlib
from collections.abc import Callable


def run_on_loop(loop: asyncio.AbstractEventLoop, step: Callable[[], None]) -> None:
    """Run `step` on its loop, unless the loop is closed: garbage is collected in any thread."""
    if asyncio._get_running_loop() is loop:
        step()
        return
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(step)
