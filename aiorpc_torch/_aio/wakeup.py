"""A wakeup of one waiting task."""

import asyncio

from .fork import check_not_forked


class Wakeup:
    """A flag that one task waits for. Confined to one event loop."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_awaited(self) -> bool:
        """Return whether a task waits."""
        return self._waiter is not None

    def set(self) -> None:
        """Wake the waiting task, or the next that waits."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until `set` is called, unless it was since the last wait.

        Raises:
            NotInWorld: in a fork of a worker's process, where nothing arrives.
        """
        if not self._is_set:
            check_not_forked()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
