"""Durations of served calls by method, measured only while `top` watches this process.

While nothing is watched, a received message costs one test of `timings.is_on`: three bytecodes.
"""

import math
import time
from collections import Counter
from typing import Any

STEPS = 8  # buckets for each doubling of the duration: a quantile is exact to 9 %
SHORTEST = 1e-6  # seconds; shorter calls count as this long


def bucket_of(seconds: float) -> int:
    """Return the number of the bucket of a duration."""
    return int(STEPS * math.log2(max(seconds, SHORTEST) / SHORTEST))


class CallRecord:
    """A served call that is recorded until it is answered: its duration, and a profiler's event."""

    __slots__ = ("_counts", "_event", "_started")

    def __init__(self, started: float, counts: Counter[int] | None, event: Any) -> None:
        self._started = started
        self._counts = counts
        self._event = event

    def end(self) -> None:
        """Count the duration: the call is answered."""
        if self._counts is not None:
            self._counts[bucket_of(time.monotonic() - self._started)] += 1


class Timings:
    """Histograms of the durations of served calls, by method. The event loop alone changes them."""

    def __init__(self) -> None:
        self.is_on = False
        self._counts: dict[str, Counter[int]] = {}

    def record(self, method: str, started: float, event: Any = None) -> CallRecord:
        """Return the record of a call that began at `started`, by `time.monotonic()`.

        It holds the event of a profiler, which ends when the record is released.
        """
        counts = None
        if self.is_on and (counts := self._counts.get(method)) is None:
            counts = self._counts[method] = Counter()
        return CallRecord(started, counts, event)

    def snapshot(self) -> dict[str, dict[int, int]]:
        """Return the number of calls in each bucket, by method. In any thread."""
        return {method: dict(counts) for method, counts in [*self._counts.items()]}


timings = Timings()
