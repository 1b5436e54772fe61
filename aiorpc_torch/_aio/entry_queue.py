"""A queue from any thread into one event loop: many items, one wake-up of the loop.

`call_soon_threadsafe` for each item would cost a system call and a loop iteration each.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# Further items wait for the next iteration, so that the loop's other callbacks run in between.
MAX_PER_ITERATION = 256


class EntryQueue(Generic[T]):
    """A queue that calls `handle` for each item, in order, on the thread of `loop`.

    It refers to the loop weakly: a completion that never comes keeps its queue alive, and must not
    keep a closed loop and its selector alive too.
    """

    __slots__ = ("_handle", "_is_scheduled", "_items", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[T], None]) -> None:
        self._loop = weakref.ref(loop)
        self._handle = handle
        self._items: deque[T] = deque()
        self._is_scheduled = False

    def put(self, item: T) -> None:
        """Add an item, from any thread. Drop the item if the loop is closed."""
        self._items.append(item)
        loop = self._loop()
        try:
            if loop is None or loop.is_closed():  # it may be closed with a drain scheduled
                self._items.clear()
            # Two threads may both schedule a drain: the second one finds nothing, which is
            # harmless. `_drain` clears the flag before it looks: no item is left without a drain.
            elif not self._is_scheduled:
                self._is_scheduled = True
                loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # it was closed meanwhile
            self._items.clear()

    def _drain(self) -> None:
        self._is_scheduled = False
        try:
            for _ in range(min(len(self._items), MAX_PER_ITERATION)):
                self._handle(self._items.popleft())
        finally:  # the loop reports what `handle` raises; the other items are still handled
            if self._items and not self._is_scheduled and (loop := self._loop()) is not None:
                self._is_scheduled = True
                loop.call_soon(self._drain)
