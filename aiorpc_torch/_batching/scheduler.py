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
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from .policies import Fill

T = TypeVar("T")


class Reason(enum.Enum):
    """Reason for the start of a batch."""

    FULL = "full"
    WAITED = "waited"
    SLOT = "slot"
    ROUND = "round"
    QUORUM = "quorum"


# Not frozen: that would take twice as long to create.
@dataclass(slots=True, eq=False)
class Batch(Generic[T]):
    """The members of one batch, in order of arrival."""

    items: tuple[T, ...]
    reason: Reason
    weight: float = 0.0  # of its calls together, where that is bounded


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

    Attributes:
        waiting: the waiting items, in order of arrival.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._running = 0
        self.waiting: dict[T, Any] = {}  # in order; a dict, for items that leave amid the others

    @property
    def is_idle(self) -> bool:
        """Return whether nothing waits and nothing runs."""
        return not self.waiting and not self._running

    def can_accept(self) -> bool:
        """Return whether another item may wait."""
        return True

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self.waiting)

    @abc.abstractmethod
    def use(self, policy: Any) -> None:
        """Follow a policy of the same kind from now on. None of its numbers is a function.

        Call it before the first item if a number of the policy at the start is one.
        """

    @abc.abstractmethod
    def add(self, item: T, now: float, traits: CallTraits = DEFAULT_TRAITS) -> None:
        """Add an item that arrived at time `now`."""

    @abc.abstractmethod
    def discard(self, item: T) -> bool:
        """Remove the item of a cancelled call; return False if it does not wait (any longer)."""

    @abc.abstractmethod
    def deadline(self) -> float | None:
        """Return when `next_batch` will return one without another event; None if never."""

    def close(self) -> tuple[T, ...]:
        """Remove and return all waiting items, in order of arrival."""
        waiting = tuple(self.waiting)
        self.waiting.clear()
        return waiting

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


class FillScheduler(Scheduler[T]):
    """A scheduler for `Fill`: any callers share a batch if their keys are equal."""

    def __init__(self, policy: Fill) -> None:
        # A number may be a function of the object until `use` is called.
        super().__init__(policy.max_concurrent_batches)  # type: ignore[arg-type]
        self._policy: Any = policy
        self._key_queues: dict[Hashable, _KeyQueue[T]] = {}  # none is empty
        self.waiting: dict[T, Hashable] = {}  # with their keys
        self._full: set[Hashable] = set()  # keys with a full batch, while there are several keys
        self._added = 0  # numbers the items, so that those of several keys have an order

    def use(self, policy: Fill) -> None:
        self._policy, self._slots = policy, policy.max_concurrent_batches  # type: ignore[assignment]
        for key in self._key_queues if self._full or len(self._key_queues) > 1 else ():
            self._note_full(key)

    def can_accept(self) -> bool:
        limit = self._policy.max_pending
        return limit is None or len(self.waiting) < limit

    def add(self, item: T, now: float, traits: CallTraits = DEFAULT_TRAITS) -> None:
        key, weight, _ = traits
        queue = self._key_queues.get(key)
        if queue is None:
            queue = self._key_queues[key] = {}
        queue[item] = self._added, now, weight
        self.waiting[item] = key
        self._added += 1
        # A key that was alone is noted at its next change. Until then it has the oldest item, so
        # `_select_batch` looks at it first. (tests/unit/batching/test_policies.py)
        if len(self._key_queues) > 1:
            self._note_full(key)

    def discard(self, item: T) -> bool:
        if item not in self.waiting:
            return False
        self._remove(self.waiting[item], (item,))
        return True

    def deadline(self) -> float | None:
        if self._running >= self._slots or not self.waiting:
            return None
        oldest = _oldest(self._key_queues[next(iter(self.waiting.values()))])[1]
        return oldest + self._policy.max_wait  # type: ignore[no-any-return]

    def close(self) -> tuple[T, ...]:
        self._key_queues.clear()
        self._full.clear()
        return super().close()

    def _select_batch(self, now: float) -> Batch[T] | None:
        if not self.waiting:
            return None
        # The key with the oldest item goes first: no key starves. If that item has not waited long
        # enough, no item has, and only a full batch may start.
        batch = self._batch_of(next(iter(self.waiting.values())), now)
        if batch is not None or len(self._key_queues) == 1 or not self._full:
            return batch
        queues = self._key_queues
        return self._batch_of(min(self._full, key=lambda key: _oldest(queues[key])), now)

    def _batch_of(self, key: Hashable, now: float) -> Batch[T] | None:
        """Remove and return the next batch of `key`, None if it may not start yet."""
        queue = self._key_queues[key]
        size, is_full = self._next_size(queue)
        if (reason := self._reason(queue, now, is_full=is_full)) is None:
            return None
        items, weight = tuple(islice(queue, size)), 0.0
        if self._policy.max_weight is not None:
            weight = sum(own for _, _, own in islice(queue.values(), size))
        self._remove(key, items)
        return Batch(items, reason, weight)

    def _reason(self, queue: _KeyQueue[T], now: float, *, is_full: bool) -> Reason | None:
        if is_full:
            return Reason.FULL
        if self._policy.max_wait == 0.0:
            return Reason.SLOT
        # The same sum as in deadline(): rounding can make `now - oldest >= max_wait` false at the
        # deadline itself, and the timer would fire for ever.
        return Reason.WAITED if now >= _oldest(queue)[1] + self._policy.max_wait else None

    def _next_size(self, queue: _KeyQueue[T]) -> tuple[int, bool]:
        """Return the size of the next batch, at least one, and whether that batch is full.

        A call above `max_weight` goes alone: a policy that wants to refuse it raises in `weight`.
        """
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

    def _note_full(self, key: Hashable) -> None:
        """Note whether the next batch of `key` is full; the key may have no items."""
        queue = self._key_queues.get(key)
        if queue is not None and self._next_size(queue)[1]:
            self._full.add(key)
        else:
            self._full.discard(key)

    def _remove(self, key: Hashable, items: tuple[T, ...]) -> None:
        queue, keys = self._key_queues[key], self.waiting
        for item in items:
            del queue[item], keys[item]
        if not queue:
            del self._key_queues[key]
        if self._full or len(self._key_queues) > 1:
            self._note_full(key)


def _oldest(queue: _KeyQueue[T]) -> tuple[int, float, float]:
    """Return number, time of arrival and weight of the oldest item."""
    return next(iter(queue.values()))
