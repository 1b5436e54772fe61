"""The consumer's end of a stream: items in order, credit for those that were taken.

Knows futures of one loop; how items arrive and credit leaves is the link's.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from ._columns import END
from ._exceptions import Failure
from ._lane import Lane
from ._streams import CREDIT
from ._wire import Broken


class Incoming:
    """What a link delivers to. `grant` sends credit for so much that was consumed."""

    def __init__(self, grant: Callable[[int], None]) -> None:
        self._grant = grant
        self._lane: Lane[Any] = Lane()
        self._items: deque[Any] = deque()
        self._taken = 0
        self._end: Any = None  # END, or what raises; nothing comes after it
        self._waiter: asyncio.Future[None] | None = None

    def arrived(self, index: int, item: Any, price: int) -> bool:
        """An item, in whichever order. True if the stream has come to its end."""
        for each, cost in self._lane.arrived(index, (item, price)):
            if each is END or type(each) is Failure:
                self._finish(each)
                return True
            self._items.append((each, cost))
        self._wake()
        return False

    def fail(self, broken: Broken | Failure) -> None:
        """Nothing more will come."""
        self._finish(broken)

    def close(self) -> None:
        """The consumer has left: whoever asks for an item finds the end."""
        self._items.clear()
        self._end = END
        self._wake()

    def is_awaited(self) -> bool:
        """Whether somebody waits for the next item."""
        return self._waiter is not None and not self._waiter.done()

    async def next(self) -> Any:
        """The next item; what was yielded before an error comes before it.

        Raises:
            StopAsyncIteration: at the end.
        """
        while not self._items:
            if self._end is not None:
                self._raise()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item, price = self._items.popleft()
        self._taken += price
        if self._taken >= CREDIT // 2 and self._end is None:
            self._grant(self._taken)
            self._taken = 0
        return item

    def _raise(self) -> None:
        end, self._end = self._end, END  # an error is raised once, then it is over
        if end is END:
            raise StopAsyncIteration
        end.get()

    def _finish(self, end: Any) -> None:
        if self._end is None:
            self._end = end
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and self.is_awaited():
            self._waiter.set_result(None)
