"""Iterators over what arrives, with the manners of an async generator."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

R = TypeVar("R")


class ItemIterator(AsyncIterator[R]):
    """The items or results of a call. An early end stops the call: `_next` waits, `_stop` stops.

    One task waits at a time. An exception, or a wait that was cancelled, ends the iteration.
    """

    _KIND = "item of this stream"  # what another task waits for

    def __init__(self) -> None:
        self._bound: float | None = None  # earlier of the call's own deadline and a scope's
        self._is_awaited = self._is_over = self._is_cut_short = False

    def _next(self) -> Awaitable[R]:
        """Wait for the next item."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Stop the call, and wake the task that waits."""
        raise NotImplementedError

    async def __anext__(self) -> R:
        if self._is_awaited:
            raise RuntimeError(f"another task waits for the next {self._KIND}")
        if self._is_cut_short:
            # The wait that was cancelled has ended the call, as it ends an async generator. Such a
            # one then seems to be over, and what was to come is lost without a word.
            raise RuntimeError(
                f"{self!r} has ended: a wait for its next item was cancelled, by "
                "`asyncio.wait_for`, say. To wait with a time limit make `task = "
                "asyncio.ensure_future(anext(items))` once, and "
                "`await asyncio.wait([task], timeout=...)` until it is done"
            )
        if self._is_over:
            raise StopAsyncIteration
        self._is_awaited = True
        try:
            return await self._next()
        except BaseException as exc:
            self._is_over, self._is_cut_short = True, not isinstance(exc, Exception)
            self._stop()
            if not self._is_cut_short and has_passed(self._bound):
                await asyncio.sleep(0)  # if a scope's deadline has passed as well, it reports it
            raise
        finally:
            self._is_awaited = False

    async def aclose(self) -> None:
        """Stop the call. A remote generator is closed: its `finally` runs. `break` does so too."""
        self._is_over, self._is_cut_short = True, False
        self._stop()


def has_passed(deadline: float | None) -> bool:
    """Return whether a `time.monotonic()` is over; False for None."""
    return deadline is not None and deadline <= time.monotonic()
