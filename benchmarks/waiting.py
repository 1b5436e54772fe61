"""Is it worth waiting for more calls, and can the wait adapt itself?

Callers arrive at random, first more and more of them, then fewer. The batched function takes a
fixed time and a little for each item. The state machine decides, in virtual time, under several
fixed waits and one that adapts to a target. It grows while the 99th percentile of the last second
is below the target, and is halved when it is above. The same seed gives the same table.

    python -m benchmarks.waiting [--quick] [--plot PATH]
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import quantiles

from aiorpc_torch import Fill
from aiorpc_torch._batching.scheduler import Batch, FillScheduler

from ._compare import lay_out
from ._plot import ALSO_OURS, OTHER, OURS, RAW, Curve, Panel, draw

FIXED, EACH = 0.004, 0.00005  # seconds of the function: for a batch, and for each item
SIZE = 32  # calls in a batch at most: 5,700 calls a second if all are full
LOADS = [100, 300, 1_000, 3_000, 5_000, 3_000, 1_000, 300, 100]  # calls a second
SPELL = 5.0  # seconds of each load
TARGET = 0.015  # seconds, the 99th percentile aimed at by the adaptive wait
WAITS = [0.0, 0.001, 0.002, 0.005, 0.010]


@dataclass
class Course:
    """A run: each call's arrival and end, each batch's start and size."""

    calls: list[tuple[float, float]] = field(default_factory=list)
    batches: list[tuple[float, int]] = field(default_factory=list)

    def latency(self, load: int, part: float) -> float:
        """Return the milliseconds below which `part` of the calls under that load took."""
        spells = {number for number, each in enumerate(LOADS) if each == load}
        found = [end - at for at, end in self.calls if int(at / SPELL) in spells]
        return quantiles(found, n=100)[round(part * 100) - 1] * 1e3

    def busy(self) -> float:
        """Return the part of the time in which the function ran."""
        spent = sum(FIXED + EACH * size for _, size in self.batches)
        return spent / max(end for _, end in self.calls)


class Adaptive:
    """A wait that grows below the target, and is halved above it."""

    def __init__(self) -> None:
        self.wait = 0.0
        self._recent: list[float] = []
        self._look = 1.0

    def ended(self, now: float, latencies: list[float]) -> None:
        self._recent += latencies
        if now < self._look or len(self._recent) < 2:
            return
        late = quantiles(self._recent, n=100)[98] > TARGET
        self.wait = self.wait / 2 if late else min(self.wait + 0.001, TARGET)
        self._recent, self._look = [], now + 1.0


def arrivals() -> Iterator[float]:
    chance = random.Random(0)
    now = 0.0
    for number, load in enumerate(LOADS):
        now = max(now, number * SPELL)
        while (now := now + chance.expovariate(load)) < (number + 1) * SPELL:
            yield now


def run(wait: float | None) -> Course:
    """Run all loads with one wait; None: with the adaptive one."""
    scheduler: FillScheduler[float] = FillScheduler(Fill(SIZE, wait or 0.0))
    adaptive = Adaptive() if wait is None else None
    course = Course()
    coming = arrivals()
    comes: float | None = next(coming)
    ends: tuple[float, Batch[float]] | None = None
    while comes is not None or ends is not None or len(scheduler):
        due = [at for at in (comes, ends and ends[0], scheduler.deadline()) if at is not None]
        now = min(due)
        if ends is not None and ends[0] == now:
            scheduler.finish_batch(now)
            course.calls += [(at, now) for at in ends[1].items]
            if adaptive is not None:
                adaptive.ended(now, [now - at for at in ends[1].items])
                scheduler._policy = replace(scheduler._policy, max_wait=adaptive.wait)
            ends = None
        elif comes == now:
            scheduler.add(comes, now)
            comes = next(coming, None)
        if isinstance(left := scheduler.next_batch(now), Batch):
            course.batches.append((now, len(left.items)))
            ends = now + FIXED + EACH * len(left.items), left
    return course


def main() -> None:
    parser = argparse.ArgumentParser(description="Fixed and adaptive waits, in virtual time.")
    parser.add_argument("--quick", action="store_true", help="no effect: this takes seconds")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a figure: .svg or .png")
    given = parser.parse_args()
    courses = {f"{wait * 1e3:g} ms": run(wait) for wait in WAITS}
    courses[f"adaptive, {TARGET * 1e3:g} ms"] = run(None)
    loads = sorted({*LOADS})
    head = ("max_wait", *(f"p99 at {load:,}/s" for load in loads), "batches", "busy")
    rows = [
        (
            name,
            *(f"{course.latency(load, 0.99):.1f}" for load in loads),
            f"{len(course.batches):,}",
            f"{course.busy():.0%}",
        )
        for name, course in courses.items()
    ]
    print("milliseconds from a call's arrival to its answer; 4 ms a batch and 0.05 an item")
    lay_out([head, *rows])
    looks = [OURS, ALSO_OURS, OTHER, ("#999999", "v"), ("#cc79a7", "P"), RAW]
    curves = [
        Curve(name, look, loads, [[course.latency(load, 0.99)] for load in loads])
        for (name, course), look in zip(courses.items(), looks, strict=True)
    ]
    draw([Panel("Waiting for more calls", "calls a second", "p99, ms", curves)], given.plot)


if __name__ == "__main__":
    main()
