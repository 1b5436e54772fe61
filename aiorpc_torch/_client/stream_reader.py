"""The consumer's end of a stream: items in order, credit for those that were taken.

Knows futures of one loop; how items arrive and credit leaves is the connection's.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from .._protocol.columns import END, Held
from .._protocol.exceptions import Failure
from .._protocol.targets import Broken
from .._protocol.window import CREDIT


class Item:
    """A place in the order of items: its value, `Held` until it was collected, and its price."""

    __slots__ = ("price", "value")

    def __init__(self, value: Any, price: int) -> None:
        self.value = value
        self.price = price


class Incoming:
    """What a connection delivers to. `grant` sends credit for so much that was consumed."""

    def __init__(self, grant: Callable[[int], None]) -> None:
        self._grant = grant
        self._items: deque[Item] = deque()
        self._taken = 0
        self._end: Any = None  # END, or what raises; nothing comes after it
        self._waiter: asyncio.Future[None] | None = None
        self.target: Any = None  # of the call that yields them

    def arrived(self, value: Any, price: int) -> Item | None:
        """Take the next item, or the end; the place of an item that is held yet."""
        if value is END or type(value) is Failure:
            self._finish(value)
            return None
        if self._end is not None:  # the consumer has left
            return None
        item = Item(value, price)
        self._items.append(item)
        self._wake()
        return item if type(value) is Held else None

    def fill(self, item: Item, value: Any) -> None:
        """Take the value of an item that was held."""
        item.value = value
        self._wake()

    def fail(self, broken: Broken | Failure) -> None:
        """Nothing more will come."""
        while any(type(item.value) is Held for item in self._items):
            self._items.pop()
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
        while not self._items or type(self._items[0].value) is Held:
            if self._end is not None and not self._items:
                self._raise()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if type(item.value) is Failure or type(item.value) is Broken:  # it was not to be had
            self.close()
            item.value.get()
        self._taken += item.price
        if self._taken >= CREDIT // 2 and self._end is None:
            self._grant(self._taken)
            self._taken = 0
        return item.value

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
