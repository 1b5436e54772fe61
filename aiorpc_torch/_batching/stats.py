"""What the batches of a `@batched` function were like, in numbers.

Counted by its queues, of whichever instance, and read by `stats`, in any thread.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from statistics import quantiles

from .registry import Living

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
    queues: Living[Sized] = field(default_factory=Living)
    items: int = 0
    batches: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def left(self, reason: str, waits: Sequence[float]) -> None:
        """A batch has left, whose callers had waited so many seconds."""
        self.batches += 1
        self.items += len(waits)
        self.reasons[reason] += 1
        self.waits.extend(waits)

    def dismissed(self, reason: str) -> None:
        """Callers that waited were sent away."""
        self.reasons[reason] += 1

    def was_used(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.reasons or self.queues)


_tallies: Living[Tally] = Living()


def new_tally(name: str, size: int) -> Tally:
    """Of a function, for as long as that lives."""
    tally = Tally(name, size)
    _tallies.add(tally)
    return tally


def batch_stats() -> dict[str, BatchStats]:
    """Of every function that was called, by its name."""
    found: defaultdict[str, list[Tally]] = defaultdict(list)
    for tally in _tallies.all():
        if tally.was_used():
            found[tally.name].append(tally)
    return {name: _snapshot(tallies) for name, tallies in found.items()}


def _snapshot(tallies: Sequence[Tally]) -> BatchStats:
    """Of functions of one name, made by one factory for instance."""
    reasons: Counter[str] = Counter()
    waits: list[float] = []
    for tally in tallies:
        reasons.update({**tally.reasons})  # copied in one step: its loop may be counting
        waits += [*tally.waits]
    waits = waits[-RECENT:]
    marks = quantiles(waits, n=100, method="inclusive") if len(waits) > 1 else waits * 99
    return BatchStats(
        batches=sum(tally.batches for tally in tallies),
        items=sum(tally.items for tally in tallies),
        size=max(tally.size for tally in tallies),
        reasons=dict(reasons),
        waiting=sum(len(queue) for tally in tallies for queue in tally.queues.all()),
        wait_p50=marks[49] if marks else None,
        wait_p99=marks[98] if marks else None,
    )
