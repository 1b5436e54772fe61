"""The receiving end of a stream: items in order, and credit for those that the consumer took.

The connection delivers the items and sends the credit. Confined to its event loop.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._aio.loops import Wakeup
from .._wire.ancestry import CallKey
from .._wire.columns import STREAM_END, HeldResult
from .._wire.connection_state import INITIAL_CREDIT
from .._wire.exceptions import RemoteFailure
from .._wire.pickling import CallAborted
from .._wire.targets import Entered, call_name, target_name
from .answers import raise_aborted


@dataclass(slots=True, eq=False)
class Item:
    """An item of a stream: its value, `HeldResult` until collected, and its cost in credit."""

    value: Any
    cost: int


class StreamReader:
    """The items of one stream that the consumer has not taken.

    Its connection sends credit for more.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._consumed = 0  # credit to grant
        self._end: Any = None  # STREAM_END, or a failure; nothing comes after it
        self.wakeup = Wakeup()
        self.enters = False  # whether the call enters a context manager
        self.entered_by: CallKey | None = None  # the call here that has the block, None if unknown
        self.entered_in: Callable[[], Any] = lambda: None  # the task of the block, None if freed
        self.connection: Any = None  # over which the call is sent
        self.number = 0  # of the call there
        self.target: Any = None  # of the call
        self.encoded: Any = None  # the target as it is sent
        self.event: Any = None  # of a profiler that records the call, until the end
        self.started = 0.0  # `time.monotonic()` of the call

    def add(self, value: Any, cost: int) -> Item | None:
        """Add the next item or the end; return the item if it is held by the callee."""
        if value is STREAM_END or type(value) is RemoteFailure:
            self._finish(value)
            return None
        if self._end is not None:  # the consumer has left
            return None
        item = Item(value, cost)
        self._items.append(item)
        self.wakeup.set()
        return item if type(value) is HeldResult else None

    def fill(self, item: Item, value: Any) -> None:
        """Set the value of an item that was held."""
        item.value = value
        self.wakeup.set()

    def fail(self, failure: CallAborted | RemoteFailure) -> None:
        """End the stream with a failure; items that were not collected are dropped."""
        while self.is_collecting():
            self._items.pop()
            self._end = None  # if it has come, it was that of the items which are dropped
        self._finish(failure)

    def has_item(self) -> bool:
        """Return whether `next` has an item at once."""
        return bool(self._items) and type(self._items[0].value) is not HeldResult

    def is_collecting(self) -> bool:
        """Return whether items are on their way that torch RPC brings."""
        return any(type(item.value) is HeldResult for item in self._items)

    def close(self) -> None:
        """Drop all items: the consumer has left, and `next` finds the end."""
        self._items.clear()
        self._end = STREAM_END
        self.event = None
        self.wakeup.set()

    async def next(self) -> Any:
        """Return the next item. A failure is raised after the items that came before it.

        Raises:
            StopAsyncIteration: at the end.
        """
        while not self._items or type(self._items[0].value) is HeldResult:
            if self._end is not None and not self._items:
                self.raise_failure()
                raise StopAsyncIteration
            await self.wakeup.wait()
        item = self._items.popleft()
        if type(item.value) in (RemoteFailure, CallAborted):  # it could not be collected
            self.close()
            self._raise(item.value)
        self._consumed += item.cost
        if self._consumed >= INITIAL_CREDIT // 2 and self._end is None:
            self.connection.grant(self.number, self._consumed)
            self._consumed = 0
        if type(item.value) is Entered:
            if not self.enters:
                name = target_name(self.target)
                raise TypeError(f"{name} is a context manager: use `async with`, not `async for`")
            return item.value.value  # what its entry has returned
        if self.enters:
            name = target_name(self.target)
            raise TypeError(f"{name} is a generator: use `async for`, not `async with`")
        return item.value

    def raise_failure(self) -> None:
        """Raise the failure that has ended the stream, if one has."""
        if self._end is not None and self._end is not STREAM_END:
            end, self._end = self._end, STREAM_END  # a failure is raised once
            self._raise(end)

    def _raise(self, failure: CallAborted | RemoteFailure) -> None:
        if type(failure) is CallAborted:
            raise_aborted(failure, call_name(self.target))
        failure.raise_()

    def _finish(self, end: Any) -> None:
        if self._end is None:
            self._end = end
            self.event = None
            self.wakeup.set()
