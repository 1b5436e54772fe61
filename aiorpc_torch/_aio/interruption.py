"""A block that code outside of it can end with an exception."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

Interrupt = Callable[[BaseException], None]
"""Ends a block with an exception, if it still runs; the first exception counts. On its loop."""


@contextlib.asynccontextmanager
async def interruptible() -> AsyncIterator[Interrupt]:
    """Yield a function that ends the block early: the block then raises what it was given.

    Inside, the interruption is one cancellation. (A scope of anyio would cancel each further await
    too, also those with which a user's block cleans up.)
    """
    failure: BaseException | None = None

    def interrupt(exc: BaseException) -> None:
        nonlocal failure
        if failure is None:
            failure = exc
            with contextlib.suppress(RuntimeError):  # the block has ended
                block.reschedule(0.0)

    # Never used for time: `asyncio.timeout` is the standard library's way to end a block.
    block = asyncio.timeout(None)
    try:
        async with block:
            yield interrupt
    except TimeoutError:
        if failure is None or not block.expired():
            raise
        raise failure from failure.__cause__  # this timeout is not shown
