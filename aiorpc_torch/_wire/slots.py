"""Order of calls behind one whose payload is still on its way.

Later calls of the same object wait; calls of other objects do not. Otherwise one transfer would
delay all calls to its peer. `Slots` decides which calls go on, without an event loop and without
torch. The sender uses it while tensors are copied to shared memory, for the items of a stream too.
The callee uses it for what travels by torch RPC: on a device, in autograd, between hosts. Such a
call sends a slot on the connection, and its payload in a torch message.
(tests/loopback/test_payloads.py)
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

UNKNOWN_OBJECT: None = None
"""Key of a call of an unknown object, which holds back every later call."""

MAX_CLOSED = 4096  # numbers that are remembered


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    """A call in a queue; `item` is None until its payload arrives."""

    number: int
    key: Hashable
    item: T | None = None


class Slots(Generic[T]):
    """Calls without their payload, and the calls held back behind them. Items are never None.

    Attributes:
        queues: queues of calls by object; empty if no call is held back.
        unfilled: the open slots, by the number of their call. To be read only.
    """

    def __init__(self) -> None:
        self.queues: dict[Hashable, deque[_Entry[T]]] = {}
        self.unfilled: dict[int, _Entry[T]] = {}
        self._early: dict[int, T] = {}
        self._closed: dict[int, None] = {}  # the latest numbers whose slot was dropped or filled

    def __repr__(self) -> str:
        return f"<Slots {len(self.unfilled)} open, {len(self._early)} payloads early>"

    def __len__(self) -> int:
        """Return the number of open slots, and of calls held back behind them. In any thread."""
        return sum(map(len, [*self.queues.values()])) if self.queues else 0

    def open(self, number: int, key: Hashable) -> list[T]:
        """Open the slot of call `number` of the object `key`; return the items to start now."""
        item = self._early.pop(number, None)
        if item is not None:
            self._remember(number)
            return [item] if self.admit(key, item, number) else []
        entry = self.unfilled[number] = _Entry[T](number, key)
        behind = UNKNOWN_OBJECT if UNKNOWN_OBJECT in self.queues else key
        self.queues.setdefault(behind, deque()).append(entry)
        return []

    def admit(self, key: Hashable, item: T, number: int = -1) -> bool:
        """Return whether a call may start; else hold it back, to be returned later."""
        for each in (UNKNOWN_OBJECT, key):
            if (queue := self.queues.get(each)) is not None:
                queue.append(_Entry(number, key, item))
                return False
        return True

    def fill(self, number: int, item: T) -> list[T] | None:
        """Take the payload of call `number`; return the items to start now.

        A payload that arrives before its slot is kept. Return None if the slot was dropped or
        filled before: it is one of the latest `MAX_CLOSED`, as slots don't come in the order of
        their numbers.
        """
        if (entry := self.unfilled.pop(number, None)) is not None:
            self._remember(number)
            queue = self.queues.get(entry.key)
            if queue is not None and len(queue) == 1 and queue[0] is entry:  # the common case
                del self.queues[entry.key]
                return [item]
            entry.item = item
            return self._advance(entry.key)
        if number in self._closed or number in self._early:
            return None
        self._early[number] = item
        return []

    def drop(self, number: int) -> list[T]:
        """Close the slot of a cancelled call; return the items to start now."""
        entry = self.unfilled.pop(number, None)
        if entry is None:
            return []
        self._remember(number)
        queue = self.queues.get(entry.key)
        if queue is not None and entry in queue:
            queue.remove(entry)
            return self._advance(entry.key)
        self.queues[UNKNOWN_OBJECT].remove(entry)  # not the head, whose slot is open
        return []

    def take(self, number: int) -> T | None:
        """Remove and return the item of a filled slot that is held back, None if there is none."""
        for queue in self.queues.values():
            for entry in queue:
                if entry.number == number and entry.item is not None:
                    queue.remove(entry)  # not the head, whose slot is open
                    return entry.item
        return None

    def held(self) -> list[T]:
        """Return the items that are held back."""
        entries = [entry.item for queue in self.queues.values() for entry in queue]
        return [item for item in entries if item is not None]

    def close(self) -> list[T]:
        """Clear the slots; return the items that have not started."""
        left = [*self.held(), *self._early.values()]
        self.queues.clear()
        self.unfilled.clear()
        self._early.clear()
        return left

    def _remember(self, number: int) -> None:
        if len(self._closed) >= MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        self._closed[number] = None

    def _advance(self, key: Hashable) -> list[T]:
        """Return the items in a queue, and in the queues behind it, that may start now."""
        queue, ready = self.queues.pop(key, None), []
        while queue:
            entry = queue[0]
            if entry.key == key and entry.item is None:  # the next open slot of this object
                self.queues[key] = queue
                break
            queue.popleft()
            if entry.key != key and (entry.item is None or entry.key in self.queues):
                self.queues.setdefault(entry.key, deque()).append(entry)
            else:
                ready.append(entry.item)
        return ready  # type: ignore[return-value]
