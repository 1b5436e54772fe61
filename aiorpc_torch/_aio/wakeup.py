"""A wakeup of one waiting task."""

import asyncio

from .fork import check_not_forked


class Wakeup:
    """A flag that one task waits for. Confined to one event loop."""

    __slots__ = ("_is_set", "waiter")

    def __init__(self) -> None:
        self._is_set = False
        self.waiter: asyncio.Future[None] | None = None  # of the task that waits

    def is_awaited(self) -> bool:
        """Return whether a task waits."""
        return self.waiter is not None

    def set(self) -> None:
        """Wake the waiting task, or the next that waits."""
        self._is_set = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until `set` is called, unless it was since the last wait.

        Raises:
            NotInWorld: in a fork of a worker's process, where nothing arrives.
        """
        if not self._is_set:
            check_not_forked()
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        self._is_set = False
