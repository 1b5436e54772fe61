"""The scheduler of waiting calls: when a batch starts, and with which of them.

It knows neither clock nor event loop nor torch: times come in as arguments, batches come out as
values, so each rule is tested in virtual time. The driver adds an item, discards it when its caller
is cancelled, and asks for batches after every event until there are none:

    item added or discarded, batch finished, `deadline()` reached  ->  next_batch(now), until None

The members are chosen when a slot is free, not before: who was cancelled by then is not in the
batch, and who arrived by then is.
"""

import abc
import enum
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from .policies import Fill

T = TypeVar("T")


class Reason(enum.Enum):
    """Reason for the start of a batch."""

    FULL = "full"
    WAITED = "waited"
    SLOT = "slot"
    ROUND = "round"
    QUORUM = "quorum"


@dataclass(slots=True, eq=False)  # not frozen: that would take twice as long to create
class Batch(Generic[T]):
    """The members of one batch, in order of arrival."""

    items: tuple[T, ...]
    reason: Reason


@dataclass(frozen=True, slots=True, eq=False)
class TimedOutRound(Generic[T]):
    """A round without enough members at its timeout: `items` of `present`; `missing` members."""

    items: tuple[T, ...]
    present: tuple[Hashable, ...]
    missing: tuple[Hashable, ...]


class CallTraits(NamedTuple):
    """The results of the policy's functions for one call."""

    key: Hashable = None
    weight: float = 1.0
    member: Hashable = None


DEFAULT_TRAITS = CallTraits()


class Scheduler(abc.ABC, Generic[T]):
    """The waiting items of one queue; up to `slots` batches run at once.

    Items are told apart by hash and equality: use objects that compare by identity.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._running = 0

    @property
    def is_idle(self) -> bool:
        """Return whether nothing waits and nothing runs."""
        return not len(self) and not self._running

    def can_accept(self) -> bool:
        """Return whether another item may wait."""
        return True

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of waiting items."""

    @abc.abstractmethod
    def add(self, item: T, now: float, traits: CallTraits = DEFAULT_TRAITS) -> None:
        """Add an item that arrived at time `now`."""

    @abc.abstractmethod
    def discard(self, item: T) -> bool:
        """Remove the item of a cancelled call; return False if it does not wait (any longer)."""

    @abc.abstractmethod
    def deadline(self) -> float | None:
        """Return when `next_batch` will return one without another event; None if never."""

    @abc.abstractmethod
    def close(self) -> tuple[T, ...]:
        """Remove and return all waiting items, in order of arrival."""

    @abc.abstractmethod
    def _select_batch(self, now: float) -> Batch[T] | TimedOutRound[T] | None:
        """Remove and return the next batch, given that a slot is free."""

    def next_batch(self, now: float) -> Batch[T] | TimedOutRound[T] | None:
        """Return what starts at time `now`, or None. A batch runs until `finish_batch`."""
        if self._running >= self._slots:
            return None
        batch = self._select_batch(now)
        self._running += isinstance(batch, Batch)
        return batch

    def finish_batch(self, now: float) -> None:
        """Free the slot of a batch that has ended at time `now`, with or without an error."""
        if not self._running:
            raise ValueError("no batch is running")
        self._running -= 1


_KeyQueue = dict[T, tuple[int, float, float]]
"""Waiting items of one key in order of arrival: number and time of arrival, weight."""

_Heap = list[tuple[int, Hashable]]
_EMPTY = object()


class FillScheduler(Scheduler[T]):
    """A scheduler for `Fill`: any callers share a batch if their keys are equal."""

    def __init__(self, policy: Fill) -> None:
        super().__init__(policy.max_concurrency)
        self._policy = policy
        self._key_queues: dict[Hashable, _KeyQueue[T]] = {}  # none is empty
        self._keys: dict[T, Hashable] = {}  # unless the key is None
        # Keys by the arrival number of their oldest item: all keys, and those with a full batch.
        # An outdated entry stays until it reaches the top, or `_push` rebuilds the heap. Without
        # a second key both are empty.
        self._by_age: _Heap = []
        self._full_by_age: _Heap = []
        self._added = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def can_accept(self) -> bool:
        limit = self._policy.max_pending
        return limit is None or self._count < limit

    def add(self, item: T, now: float, traits: CallTraits = DEFAULT_TRAITS) -> None:
        key, weight, _ = traits
        queue = self._key_queues.get(key)
        if queue is None:
            queue = self._key_queues[key] = {}
        queue[item] = self._added, now, weight
        if key is not None:
            self._keys[item] = key
        self._added += 1
        self._count += 1
        if len(self._key_queues) == 1:  # the common case needs no heap
            return
        if len(self._key_queues) == 2 and not self._by_age:
            for each in self._key_queues:
                self._push_both(each)
        elif len(queue) == 1:
            self._push_both(key)
        elif self._next_size(queue)[1]:
            self._push(self._full_by_age, key)

    def discard(self, item: T) -> bool:
        key = self._keys.get(item)
        if item not in self._key_queues.get(key, ()):
            return False
        self._remove(key, (item,))
        return True

    def deadline(self) -> float | None:
        if self._running >= self._slots or not self._count:
            return None
        is_only = len(self._key_queues) == 1
        key = next(iter(self._key_queues)) if is_only else self._peek(self._by_age)
        return _oldest(self._key_queues[key])[1] + self._policy.max_wait

    def close(self) -> tuple[T, ...]:
        waiting: _KeyQueue[T] = {}
        for queue in self._key_queues.values():
            waiting.update(queue)
        for each in (self._key_queues, self._keys, self._by_age, self._full_by_age):
            each.clear()
        self._count = 0
        return tuple(sorted(waiting, key=waiting.__getitem__))

    def _select_batch(self, now: float) -> Batch[T] | None:
        if len(self._key_queues) == 1:
            return self._batch_of(next(iter(self._key_queues)), now)
        # The key with the oldest item goes first: no key starves. If that item has not waited long
        # enough, no item has, and only a full batch may start.
        for heap in (self._by_age, self._full_by_age):
            key = self._peek(heap)
            if key is _EMPTY:
                return None
            if (batch := self._batch_of(key, now)) is not None:
                return batch
        return None

    def _batch_of(self, key: Hashable, now: float) -> Batch[T] | None:
        """Remove and return the next batch of `key`, None if it may not start yet."""
        queue = self._key_queues[key]
        size, is_full = self._next_size(queue)
        if (reason := self._reason(queue, now, is_full=is_full)) is None:
            return None
        items = tuple(islice(queue, size))
        self._remove(key, items)
        return Batch(items, reason)

    def _push_both(self, key: Hashable) -> None:
        self._push(self._by_age, key)
        if self._next_size(self._key_queues[key])[1]:
            self._push(self._full_by_age, key)

    def _push(self, heap: _Heap, key: Hashable) -> None:
        heappush(heap, (_oldest(self._key_queues[key])[0], key))
        if len(heap) > 2 * len(self._key_queues) + 16:  # most entries are outdated
            heap[:] = [
                (_oldest(queue)[0], key)
                for key, queue in self._key_queues.items()
                if heap is self._by_age or self._next_size(queue)[1]
            ]
            heapify(heap)

    def _peek(self, heap: _Heap) -> Hashable:
        """Return the first key of a heap, or `_EMPTY`; drop outdated entries before it."""
        while heap:
            number, key = heap[0]
            queue = self._key_queues.get(key)
            is_valid = queue is not None and _oldest(queue)[0] == number
            if is_valid and (heap is self._by_age or self._next_size(self._key_queues[key])[1]):
                return key
            heappop(heap)
        return _EMPTY

    def _reason(self, queue: _KeyQueue[T], now: float, *, is_full: bool) -> Reason | None:
        if is_full:
            return Reason.FULL
        if self._policy.max_wait == 0.0:
            return Reason.SLOT
        # The same sum as in deadline(): rounding can make `now - oldest >= max_wait` false at the
        # deadline itself, and the timer would fire for ever.
        return Reason.WAITED if now >= _oldest(queue)[1] + self._policy.max_wait else None

    def _next_size(self, queue: _KeyQueue[T]) -> tuple[int, bool]:
        """Return the size of the next batch, at least one, and whether that batch is full."""
        size, limit = self._policy.max_size, self._policy.max_weight
        if limit is not None:
            weight = 0.0
            for count, (_, _, own) in enumerate(islice(queue.values(), size)):
                weight += own
                if count and weight > limit:
                    return count, True
                if weight >= limit:
                    return count + 1, True
        return size, len(queue) >= size

    def _remove(self, key: Hashable, items: tuple[T, ...]) -> None:
        queue = self._key_queues[key]
        is_only = len(self._key_queues) == 1
        head = 0 if is_only else _oldest(queue)[0]
        self._count -= len(items)
        for item in items:
            del queue[item]
            if key is not None:
                del self._keys[item]
        if not queue:
            del self._key_queues[key]
        if is_only:
            return
        if len(self._key_queues) == 1:
            self._by_age.clear()
            self._full_by_age.clear()
        elif queue and _oldest(queue)[0] != head:
            self._push_both(key)


def _oldest(queue: _KeyQueue[T]) -> tuple[int, float, float]:
    return next(iter(queue.values()))
