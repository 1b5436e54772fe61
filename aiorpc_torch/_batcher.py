"""When waiting requests become a batch.

Rule of this room: no clock, no event loop, no torch. Events and times come in as arguments, what
to do comes out as a value; so every rule is tested in virtual time. The driver adds an item,
discards it when its caller gives up, and after every event takes batches until there are none:

    added, discarded, finished, or `deadline()` reached  ->  take(now), until it returns None

Members are chosen in `take`, so only when a slot is free (late binding): whoever has left by
then is not in the batch, whoever has come by then is.
"""

import enum
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

__all__ = ("Batch", "Batcher", "Fill", "Reason", "Round")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fill:
    """Any callers, together: a batch leaves when it is full or its oldest item has waited.

    Args:
        max_size: most items in a batch.
        max_wait: seconds the oldest item waits for company while a slot is free. 0.0 never waits:
            batches form while the body is busy, and of what one turn of the loop brings.
    """

    max_size: int
    max_wait: float = 0.0

    def __post_init__(self) -> None:
        _check_count("max_size", self.max_size)
        if not 0.0 <= self.max_wait < float("inf"):
            raise ValueError(f"max_wait is seconds, at least 0 and finite, not {self.max_wait!r}")


@dataclass(frozen=True, slots=True)
class Round:
    """Exactly `size` callers, together: a synchronous round, such as a parameter server's step."""

    size: int

    def __post_init__(self) -> None:
        _check_count("size", self.size)


class Reason(enum.Enum):
    """Why a batch left."""

    FULL = "full"
    WAITED = "waited"
    SLOT = "slot"
    ROUND = "round"


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Generic[T]):
    """The members of one batch, in order of arrival, and why they left."""

    items: tuple[T, ...]
    reason: Reason


class Batcher(Generic[T]):
    """The queue of one `@batched` function: one batch at a time runs, the rest waits here.

    Items are told apart by hash and equality: give it objects that compare by identity.
    """

    def __init__(self, policy: Fill | Round) -> None:
        self._policy = policy
        self._size = policy.max_size if isinstance(policy, Fill) else policy.size
        self._waiting: dict[T, float] = {}  # insertion order is arrival order
        self._running = 0

    def __repr__(self) -> str:
        return f"<Batcher {self._policy}: {len(self._waiting)} waiting, {self._running} running>"

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._waiting and not self._running

    def add(self, item: T, now: float) -> None:
        """`item` arrived at time `now`."""
        self._waiting[item] = now

    def discard(self, item: T) -> bool:
        """The caller of `item` gave up: it vanishes. False if it is not (any longer) waiting."""
        return self._waiting.pop(item, None) is not None

    def take(self, now: float) -> Batch[T] | None:
        """The batch that leaves at time `now`, or None. What is taken runs until `finished`."""
        reason = self._reason(now)
        if reason is None:
            return None
        items = tuple(islice(self._waiting, self._size))
        for item in items:
            del self._waiting[item]
        self._running += 1
        return Batch(items, reason)

    def finished(self) -> None:
        """A batch that was taken has ended, however it ended: its slot is free."""
        if not self._running:
            raise ValueError("no batch is running")
        self._running -= 1

    def deadline(self) -> float | None:
        """When `take` will return a batch though nothing else happens; None if it will not."""
        if self._running or not self._waiting or isinstance(self._policy, Round):
            return None
        return self._oldest() + self._policy.max_wait

    def close(self) -> tuple[T, ...]:
        """Everything that still waits, in order; the queue is empty afterwards."""
        items = tuple(self._waiting)
        self._waiting.clear()
        return items

    def _oldest(self) -> float:
        return next(iter(self._waiting.values()))

    def _reason(self, now: float) -> Reason | None:
        if self._running or not self._waiting:
            return None
        full = len(self._waiting) >= self._size
        if isinstance(self._policy, Round):
            return Reason.ROUND if full else None
        if full:
            return Reason.FULL
        if self._policy.max_wait == 0.0:
            return Reason.SLOT
        # The same sum as deadline(): `now - oldest >= max_wait` can be false at the deadline
        # itself, by rounding, and the timer would spin.
        return Reason.WAITED if now >= self._oldest() + self._policy.max_wait else None


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a number of callers, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} is at least 1, not {value}")
