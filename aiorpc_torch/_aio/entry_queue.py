"""From any thread into one event loop: many pushes, one wake-up.

A `call_soon_threadsafe` for each completion costs a system call and a turn of the loop each. Here
the items lie in a deque and the first to lie there wakes the loop. Knows asyncio, not torch.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# So many items are taken in one turn, that the loop breathes under thousands.
BURST = 256


class Inbox(Generic[T]):
    """Hands what any thread pushes to `take`, on the thread of `loop`, in order.

    It holds the loop weakly: whatever waits for a completion that never comes keeps an inbox
    alive, and must not keep a closed loop with all its selectors alive too.
    """

    __slots__ = ("_armed", "_items", "_loop", "_take")

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        self._loop = weakref.ref(loop)
        self._take = take
        self._items: deque[T] = deque()
        self._armed = False

    def __repr__(self) -> str:
        return f"<Inbox {len(self._items)} waiting{', armed' if self._armed else ''}>"

    def push(self, item: T) -> None:
        """From any thread. After the loop is closed the item is dropped: nobody waits for it."""
        self._items.append(item)
        loop = self._loop()
        if loop is None or loop.is_closed():  # it may have been closed while it was armed
            self._items.clear()
            return
        # Two threads may both see it unarmed and wake the loop twice: harmless. That none sees it
        # armed after the drain has looked is what counts, and why the drain disarms first.
        if not self._armed:
            self._armed = True
            self._wake()

    def _wake(self) -> None:
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._drain)
                return
        except RuntimeError:  # the loop is closed
            pass
        self._items.clear()

    def _drain(self) -> None:
        self._armed = False
        try:
            for _ in range(min(len(self._items), BURST)):
                self._take(self._items.popleft())
        finally:  # whatever one item raises, the loop reports it and the rest is not forgotten
            if self._items and not self._armed:
                self._armed = True
                self._wake()
