"""Statistics of the batches of `@batched` functions: counted by the queues, read in any thread."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from statistics import quantiles

from .._aio.identity import WeakIdentityDict

RECENT = 1024  # waiting times kept per function


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Statistics of one `@batched` function in this process, over all instances.

    Attributes:
        batches: Batches that have started.
        items: Calls in these batches.
        size: Calls in a full batch, or in a round.
        reasons: Batches by the reason of their start: `full`, `waited`, `slot` (one was free),
            `round` or `quorum`; and how often waiting calls failed: by `timeout` of a round, or
            `closed` as the worker stopped.
        waiting: Calls that wait now.
        wait_p50: Seconds from a call's arrival to the start of its batch: median of recent calls.
        wait_p99: Seconds from a call's arrival to the start of its batch: 99th percentile.
        fill: Average size of a batch divided by the size of a full one.
    """

    batches: int
    items: int
    size: int
    reasons: dict[str, int]
    waiting: int
    wait_p50: float | None
    wait_p99: float | None
    fill: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fill", self.mean / self.size)

    @property
    def mean(self) -> float:
        """Calls in a batch, on average."""
        return self.items / self.batches if self.batches else 0.0


@dataclass(eq=False)
class BatchCounters:
    """Counters of the function `name`."""

    name: str
    size: int
    queues: WeakIdentityDict[Sized, None] = field(default_factory=WeakIdentityDict)
    items: int = 0
    batches: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def count_batch(self, reason: str, waits: Sequence[float]) -> None:
        """Count a batch that starts, and the seconds that each of its calls has waited."""
        self.batches += 1
        self.items += len(waits)
        self.reasons[reason] += 1
        self.waits.extend(waits)

    def count_rejected(self, reason: str) -> None:
        """Count waiting calls that failed together."""
        self.reasons[reason] += 1

    @property
    def is_used(self) -> bool:
        """Return whether the function was called."""
        return bool(self.reasons or self.queues)


_all_counters: WeakIdentityDict[BatchCounters, None] = WeakIdentityDict()


def new_counters(name: str, size: int) -> BatchCounters:
    """Return new counters, listed in `batch_stats` while they are alive."""
    counters = BatchCounters(name, size)
    _all_counters.set(counters, None)
    return counters


def batch_stats() -> dict[str, BatchStats]:
    """Return the statistics of every function that was called, by name."""
    found: defaultdict[str, list[BatchCounters]] = defaultdict(list)
    for counters in _all_counters.owners():
        if counters.is_used:
            found[counters.name].append(counters)
    return {name: _snapshot(group) for name, group in found.items()}


def _snapshot(group: Sequence[BatchCounters]) -> BatchStats:
    """Add up the counters of functions of one name, such as those that one factory made."""
    reasons: Counter[str] = Counter()
    waits: list[float] = []
    for counters in group:
        reasons.update({**counters.reasons})  # copied in one step: its loop may be counting
        waits += [*counters.waits]
    waits = waits[-RECENT:]
    percentiles = quantiles(waits, n=100, method="inclusive") if len(waits) > 1 else waits * 99
    return BatchStats(
        batches=sum(counters.batches for counters in group),
        items=sum(counters.items for counters in group),
        size=max(counters.size for counters in group),
        reasons=dict(reasons),
        waiting=sum(len(queue) for counters in group for queue in counters.queues.owners()),
        wait_p50=percentiles[49] if percentiles else None,
        wait_p99=percentiles[98] if percentiles else None,
    )
