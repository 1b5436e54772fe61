"""What the batches of a `@batched` function were like, in numbers.

Counted by its queues, of whichever instance, and read by `stats`.
"""

from collections import Counter, deque
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from statistics import quantiles
from weakref import WeakSet

__all__ = ("BatchStats",)

RECENT = 1024  # waits that are remembered


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Of one `@batched` function in this process, all its instances together."""

    batches: int
    """How many have left."""
    items: int
    """Calls in them, all together."""
    size: int
    """Most calls in a batch, or those of a round."""
    reasons: dict[str, int]
    """How many batches left because they were `full`, had `waited`, found a free `slot`, were a
    `round` or the `quorum` of one; of how many the callers were sent away by a `timeout` or, as
    the worker stopped, by `closed`.
    """
    waiting: int
    """Calls that wait now."""
    wait_p50: float | None
    """Seconds from a call's arrival until its batch left: the median of recent ones."""
    wait_p99: float | None
    """The same, 99 of 100 waited less."""

    @property
    def mean(self) -> float:
        """Calls in a batch."""
        return self.items / self.batches if self.batches else 0.0

    @property
    def fill(self) -> float:
        """How full batches are, between 0 and 1."""
        return self.mean / self.size


@dataclass(eq=False)
class Tally:
    """Of the function `name`."""

    name: str
    size: int
    queues: "WeakSet[Sized]" = field(default_factory=WeakSet)
    _items: int = 0
    _batches: int = 0
    _reasons: Counter[str] = field(default_factory=Counter)
    _waits: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def left(self, reason: str, waits: Sequence[float]) -> None:
        """A batch has left, whose callers had waited so many seconds."""
        self._batches += 1
        self._items += len(waits)
        self._reasons[reason] += 1
        self._waits.extend(waits)

    def dismissed(self, reason: str) -> None:
        """Callers that waited were sent away."""
        self._reasons[reason] += 1

    def __add__(self, other: "Tally") -> "Tally":
        """Both together: functions of one name, made by one factory for instance."""
        both = Tally(self.name, max(self.size, other.size))
        both.queues = self.queues | other.queues
        both._items, both._batches = self._items + other._items, self._batches + other._batches
        both._reasons, both._waits = self._reasons + other._reasons, self._waits + other._waits
        return both

    def was_used(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._reasons or self.queues)

    def snapshot(self) -> BatchStats:
        """As it is now."""
        waits = [*self._waits]
        marks = quantiles(waits, n=100, method="inclusive") if len(waits) > 1 else waits * 99
        return BatchStats(
            batches=self._batches,
            items=self._items,
            size=self.size,
            reasons=dict(self._reasons),
            waiting=sum(map(len, [*self.queues])),
            wait_p50=marks[49] if marks else None,
            wait_p99=marks[98] if marks else None,
        )


_tallies: "WeakSet[Tally]" = WeakSet()


def new_tally(name: str, size: int) -> Tally:
    """Of a function, for as long as that lives."""
    tally = Tally(name, size)
    _tallies.add(tally)
    return tally


def batch_stats() -> dict[str, BatchStats]:
    """Of every function that was called, by its name."""
    found: dict[str, Tally] = {}
    for tally in [*_tallies]:
        if tally.was_used():
            found[tally.name] = found[tally.name] + tally if tally.name in found else tally
    return {name: tally.snapshot() for name, tally in found.items()}
