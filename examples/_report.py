"""Outcomes of requests to a model server: rows, a table and a picture.

It uses outcomes and the counts of `aiorpc.stats()`, and has no code for models or calls.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

from rich.table import Table

import aiorpc_torch as aiorpc

from ._plot import curves

WAYS = {"infer": "batched", "infer_alone": "one by one"}


@dataclass
class Outcome:
    """Outcomes of a client's requests."""

    latencies: list[float] = field(default_factory=list)  # seconds, of answered requests
    late: int = 0
    shed: int = 0


class Left:
    """A count of the batches of one function that have left since its creation."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._before = self._now()

    def _now(self) -> tuple[int, Counter[str]]:
        for name, found in aiorpc.stats().batches.items():
            if name.endswith(f".{self._way}"):
                return found.items, Counter(found.reasons)
        return 0, Counter()

    def read(self) -> tuple[float, Counter[str]]:
        """Return the mean batch size, and the reasons for which batches left."""
        items, reasons = self._now()
        reasons -= self._before[1]
        return (items - self._before[0]) / max(1, reasons.total()), reasons


@dataclass
class Row:
    """Results of one way to ask, under one load."""

    way: str
    asked: float  # a second
    answered: float  # a second
    marks: tuple[float, float, float]  # p50, p95 and p99 of answered requests, milliseconds
    late: int
    shed: int
    batch: float  # mean calls in a batch
    reasons: Counter[str]  # reasons for which batches left

    def cells(self) -> list[str]:
        numbers = (self.asked, self.answered, *self.marks)
        why = ", ".join(f"{reason} {count:,}" for reason, count in self.reasons.most_common())
        texts = [f"{number:,.0f}" if number >= 100 else f"{number:.1f}" for number in numbers]
        return [self.way, *texts, f"{self.late:,}", f"{self.shed:,}", f"{self.batch:.1f}", why]


def row(way: str, outcomes: Sequence[Outcome], asked: float, took: float, left: Left) -> Row:
    """Make the row of all clients together.

    They asked for `asked` seconds, and all answers were there after `took` seconds.
    """
    latencies = [each * 1e3 for outcome in outcomes for each in outcome.latencies]
    late, shed = sum(each.late for each in outcomes), sum(each.shed for each in outcomes)
    marks = quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else [0.0] * 99
    return Row(
        WAYS[way],
        (len(latencies) + late + shed) / asked,
        len(latencies) / took,
        (marks[49], marks[94], marks[98]),
        late,
        shed,
        *left.read(),
    )


def table(rows: Sequence[Row]) -> Table:
    """Return the table of all loads, one line each."""
    found = Table(title="Milliseconds from when a request was due to its answer", box=None)
    found.add_column("")
    for name in ("asked/s", "answered/s", "p50", "p95", "p99", "late", "shed", "batch"):
        found.add_column(name, justify="right")
    found.add_column("batches left")
    for each in rows:
        found.add_row(*each.cells())
    return found


def batches() -> str:
    """Describe the `stats()` of every batched function of this process."""
    lines = []
    for name, found in aiorpc.stats().batches.items():
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in found.reasons.items())
        waits = f"{(found.wait_p50 or 0) * 1e3:.1f} ms, p99 {(found.wait_p99 or 0) * 1e3:.1f} ms"
        lines.append(
            f"{name.rpartition('.')[2]}: {found.items:,} images in {found.batches:,} batches of "
            f"{found.mean:.1f} on average, {found.fill:.0%} full; left: {reasons}; "
            f"waited in the queue: p50 {waits}"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path, title: str) -> Path:
    """Draw latency against load: the median and p99 of either way."""
    lines = {
        f"{way}, {name}": [(each.asked, each.marks[mark]) for each in rows if each.way == way]
        for way in WAYS.values()
        for name, mark in (("p50", 0), ("p99", 2))
    }
    return curves(
        path, lines, title=title, xlabel="images asked for, a second", ylabel="latency, ms"
    )
