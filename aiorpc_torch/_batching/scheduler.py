"""When waiting requests become a batch: what a queue does, and how it fills by `Fill`.

Rule of this room: no clock, no event loop, no torch. Events and times come in as arguments, what
to do comes out as a value; so every rule is tested in virtual time. The driver adds an item,
discards it when its caller gives up, and after every event takes batches until there are none:

    added, discarded, finished, or `deadline()` reached  ->  take(now), until it returns None

Members are chosen in `take`, so only when a slot is free (late binding): whoever has left by
then is not in the batch, whoever has come by then is.
"""

import abc
import enum
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from .policies import Fill, Policy

T = TypeVar("T")


class Reason(enum.Enum):
    """Why a batch left."""

    FULL = "full"
    WAITED = "waited"
    SLOT = "slot"
    ROUND = "round"
    QUORUM = "quorum"


@dataclass(slots=True, eq=False)  # not frozen: that doubles what making one takes
class Batch(Generic[T]):
    """The members of one batch, in order of arrival, and why they left."""

    items: tuple[T, ...]
    reason: Reason


@dataclass(frozen=True, slots=True, eq=False)
class Refusal(Generic[T]):
    """A round that will not be: its members, who they are, and who else was to be there."""

    items: tuple[T, ...]
    present: tuple[Hashable, ...]
    missing: tuple[Hashable, ...]


class Traits(NamedTuple):
    """What the policy's functions say of an item."""

    key: Hashable = None
    weight: float = 1.0
    member: Hashable = None


PLAIN = Traits()


class Batcher(abc.ABC, Generic[T]):
    """The queue of one `@batched` function: a few batches at a time run, the rest waits here.

    Items are told apart by hash and equality: give it objects that compare by identity.
    """

    def __init__(self, policy: Policy, slots: int) -> None:
        self._name = repr(policy)
        self._slots = slots
        self._running = 0

    def __repr__(self) -> str:
        return f"<{self._name}: {len(self)} waiting, {self._running} running>"

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not len(self) and not self._running

    def has_room(self) -> bool:
        """Whether one more may wait."""
        return True

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many wait."""

    @abc.abstractmethod
    def add(self, item: T, now: float, traits: Traits = PLAIN) -> None:
        """`item` arrived at time `now`."""

    @abc.abstractmethod
    def discard(self, item: T) -> bool:
        """The caller of `item` gave up: it vanishes. False if it is not (any longer) waiting."""

    @abc.abstractmethod
    def deadline(self) -> float | None:
        """When `take` will return something though nothing else happens; None if it will not."""

    @abc.abstractmethod
    def close(self) -> tuple[T, ...]:
        """Everything that still waits, in order of arrival; the queue is empty afterwards."""

    @abc.abstractmethod
    def _leave(self, now: float) -> Batch[T] | Refusal[T] | None:
        """What leaves, given that a slot is free."""

    def take(self, now: float) -> Batch[T] | Refusal[T] | None:
        """What leaves at time `now`, or None. A batch that was taken runs until `finished`."""
        if self._running >= self._slots:
            return None
        left = self._leave(now)
        self._running += isinstance(left, Batch)
        return left

    def finished(self, now: float) -> None:
        """A batch that was taken has ended at time `now`, however it ended: its slot is free."""
        if not self._running:
            raise ValueError("no batch is running")
        self._running -= 1


_Line = dict[T, tuple[int, float, float]]
"""Who waits, in order of arrival: the number of the arrival, its time, the weight."""

_Heap = list[tuple[int, Hashable]]
_NONE = object()


class FillBatcher(Batcher[T]):
    """Any callers, together; those of one key in a line of their own."""

    def __init__(self, policy: Fill) -> None:
        super().__init__(policy, policy.max_concurrency)
        self._policy = policy
        self._lines: dict[Hashable, _Line[T]] = {}  # none of them empty
        self._keys: dict[T, Hashable] = {}  # where a key is not None
        # Lines by the number of their oldest: all, and those that fill a batch. What holds no
        # longer stays in a heap until it comes to the top, or the heap is tidied.
        self._heads: _Heap = []
        self._full: _Heap = []
        self._added = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def has_room(self) -> bool:
        most = self._policy.max_pending
        return most is None or self._count < most

    def add(self, item: T, now: float, traits: Traits = PLAIN) -> None:
        key, weight, _ = traits
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = {}
        line[item] = self._added, now, weight
        if len(line) == 1:
            self._put(self._heads, key)
        if key is not None:
            self._keys[item] = key
        self._added += 1
        self._count += 1
        if self._start(line)[1]:
            self._put(self._full, key)

    def discard(self, item: T) -> bool:
        key = self._keys.get(item)
        if item not in self._lines.get(key, ()):
            return False
        self._remove(key, (item,))
        return True

    def deadline(self) -> float | None:
        if self._running >= self._slots or not self._count:
            return None
        key = self._first(self._heads)
        assert key is not _NONE
        return _oldest(self._lines[key])[1] + self._policy.max_wait

    def close(self) -> tuple[T, ...]:
        waiting = {item: each for line in self._lines.values() for item, each in line.items()}
        for every in (self._lines, self._keys, self._heads, self._full):
            every.clear()
        self._count = 0
        return tuple(sorted(waiting, key=waiting.__getitem__))

    def _leave(self, now: float) -> Batch[T] | None:
        # Of the lines that may leave, the one whose oldest came first: no key starves. If its
        # oldest has not waited long enough, nobody's has, and only full ones may.
        for heap in (self._heads, self._full):
            key = self._first(heap)
            if key is _NONE:
                return None
            line = self._lines[key]
            size, is_full = self._start(line)
            if (reason := self._reason(line, now, is_full=is_full)) is not None:
                items = tuple(islice(line, size))
                self._remove(key, items)
                return Batch(items, reason)
        return None

    def _put(self, heap: _Heap, key: Hashable) -> None:
        heappush(heap, (_oldest(self._lines[key])[0], key))
        if len(heap) > 2 * len(self._lines) + 16:  # most of it holds no longer
            heap[:] = [
                (_oldest(line)[0], key)
                for key, line in self._lines.items()
                if heap is self._heads or self._start(line)[1]
            ]
            heapify(heap)

    def _first(self, heap: _Heap) -> Hashable:
        """The key of the first line of a heap, or `_NONE`."""
        while heap:
            number, key = heap[0]
            line = self._lines.get(key)
            holds = line is not None and _oldest(line)[0] == number
            if holds and (heap is self._heads or self._start(self._lines[key])[1]):
                return key
            heappop(heap)
        return _NONE

    def _reason(self, line: _Line[T], now: float, *, is_full: bool) -> Reason | None:
        if is_full:
            return Reason.FULL
        if self._policy.max_wait == 0.0:
            return Reason.SLOT
        # The same sum as deadline(): `now - oldest >= max_wait` can be false at the deadline
        # itself, by rounding, and the timer would spin.
        return Reason.WAITED if now >= _oldest(line)[1] + self._policy.max_wait else None

    def _start(self, line: _Line[T]) -> tuple[int, bool]:
        """How many of its first go together, at least one, and whether they fill a batch."""
        size, most = self._policy.max_size, self._policy.max_weight
        if most is not None:
            weight = 0.0
            for count, (_, _, own) in enumerate(islice(line.values(), size)):
                weight += own
                if count and weight > most:
                    return count, True
                if weight >= most:
                    return count + 1, True
        return size, len(line) >= size

    def _remove(self, key: Hashable, items: tuple[T, ...]) -> None:
        line = self._lines[key]
        head = _oldest(line)[0]
        self._count -= len(items)
        for item in items:
            del line[item]
            if key is not None:
                del self._keys[item]
        if not line:
            del self._lines[key]
        elif _oldest(line)[0] != head:
            self._put(self._heads, key)
            if self._start(line)[1]:
                self._put(self._full, key)


def _oldest(line: _Line[T]) -> tuple[int, float, float]:
    return next(iter(line.values()))
