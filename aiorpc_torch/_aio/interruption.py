"""A block that code outside of it can end with an exception."""

import asyncio
import contextlib
from types import TracebackType


class InterruptibleBlock:
    """An `async with` block that `interrupt(exc)` ends early: the block then raises `exc`.

    Inside, the interruption is one cancellation. Call `interrupt` on the loop of the block.
    """

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        # Never used for time: `asyncio.timeout` is the standard library's way to end a block.
        self._block = asyncio.timeout(None)

    def interrupt(self, failure: BaseException) -> None:
        """End the block with `failure`, if it still runs; the first failure counts."""
        if self._failure is None:
            self._failure = failure
            with contextlib.suppress(RuntimeError):  # the block has ended
                self._block.reschedule(0.0)

    async def __aenter__(self) -> "InterruptibleBlock":
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
            raise self._failure  # noqa: B904 - its cause is not this timeout
