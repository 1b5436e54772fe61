"""Statistics of the batches of `@batched` functions: counted by the queues, read in any thread."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from .._aio.identity import WeakIdentityDict
from .policies import Fill, Policy

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
        busy: Seconds for which batches that have ended ran, waits for the turn of an `@exclusive`
            object included: all added up, also of those that ran side by side. Between two looks,
            what was added by the time between them is the share of time in which one ran.
        rows: Rows in these batches, if `concat=True` bounds them by `max_weight`; else None.
        max_rows: Rows in a full batch, or None.
        fill: Average size of a batch divided by the size of a full one: its rows by `max_rows`, or
            else its calls by `size`.
    """

    batches: int
    items: int
    size: int
    reasons: dict[str, int]
    waiting: int
    wait_p50: float | None
    wait_p99: float | None
    busy: float = 0.0
    rows: float | None = None
    max_rows: float | None = None
    fill: float = field(init=False)

    def __post_init__(self) -> None:
        found = self.mean / self.size
        if self.rows is not None and self.max_rows:
            found = self.rows / self.max_rows / max(1, self.batches)
        object.__setattr__(self, "fill", found)

    @property
    def mean(self) -> float:
        """Calls in a batch, on average."""
        return self.items / self.batches if self.batches else 0.0


@dataclass(eq=False)
class BatchCounters:
    """Counters of the function `name`."""

    name: str
    size: int
    has_rows: bool = False  # the weight of a call is its number of rows
    max_rows: float | None = None
    rows: float = 0.0
    queues: WeakIdentityDict[Sized, None] = field(default_factory=WeakIdentityDict)
    items: int = 0
    batches: int = 0
    busy: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)  # also of calls that failed together
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def note_numbers(self, policy: Any) -> None:
        """Note the numbers of a policy that are no functions of the object."""
        size = policy.max_size if isinstance(policy, Fill) else policy.size
        self.size = size if isinstance(size, int) else 1
        limit = getattr(policy, "max_weight", None)
        self.max_rows = limit if self.has_rows and isinstance(limit, int | float) else None

    def count_batch(self, reason: str, waits: Sequence[float], rows: float = 0.0) -> None:
        """Count a batch that starts, and the seconds that each of its calls has waited."""
        self.batches += 1
        if self.max_rows is not None:
            self.rows += min(rows, self.max_rows)  # a larger call runs alone
        self.items += len(waits)
        self.reasons[reason] += 1
        self.waits.extend(waits)


_all_counters: WeakIdentityDict[BatchCounters, None] = WeakIdentityDict()


def new_counters(name: str, policy: Policy, *, has_rows: bool = False) -> BatchCounters:
    """Return new counters, listed in `batch_stats` while they are alive.

    Numbers that are functions of the object are known from the first call on.
    """
    counters = BatchCounters(name, 1, has_rows)
    counters.note_numbers(policy)
    _all_counters.set(counters, None)
    return counters


def batch_stats() -> dict[str, BatchStats]:
    """Return the statistics of every function that was called, by name."""
    found: defaultdict[str, list[BatchCounters]] = defaultdict(list)
    for counters in _all_counters.owners():
        if counters.reasons or counters.queues:  # it was called
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
    limits = [each.max_rows for each in group if each.max_rows is not None]
    return BatchStats(
        rows=sum(each.rows for each in group) if limits else None,
        max_rows=max(limits, default=None),
        batches=sum(counters.batches for counters in group),
        busy=sum(counters.busy for counters in group),
        items=sum(counters.items for counters in group),
        size=max(counters.size for counters in group),
        reasons=dict(reasons),
        waiting=sum(len(queue) for counters in group for queue in counters.queues.owners()),
        wait_p50=percentiles[49] if percentiles else None,
        wait_p99=percentiles[98] if percentiles else None,
    )
