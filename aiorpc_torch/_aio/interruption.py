"""A block that something outside of it can end with an exception. Knows asyncio only."""

import asyncio
import contextlib
from types import TracebackType


class Interruption:
    """`async with Interruption() as it:` runs until its end, or until `it.end(exc)` raises there.

    On the loop that entered it. The block sees a cancellation, once.
    """

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        # Not for the time: the standard library's one way to interrupt a block, and only that one.
        self._block = asyncio.timeout(None)

    def end(self, failure: BaseException) -> None:
        """End the block, unless it has ended; the first failure counts."""
        if self._failure is None:
            self._failure = failure
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._block.reschedule(0.0)

    async def __aenter__(self) -> "Interruption":
        await self._block.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._block.__aexit__(kind, exc, traceback)
        except TimeoutError:
            if self._failure is None or not self._block.expired():
                raise
            raise self._failure  # noqa: B904 - what it was raised from is not this timeout
