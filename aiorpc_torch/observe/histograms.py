"""Histograms without locks: each thread counts in tables of its own, which a scrape adds up."""

import threading
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import NamedTuple

OTHER = "other"
"""Stands for names beyond the limit of a `NameLimit`."""


class NameLimit:
    """Bound on the names in labels: the first `limit` of them are kept, the rest are `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the name, or `other`."""
        if name in self._names:
            return name
        if len(self._names) >= self._limit:
            return OTHER
        self._names.add(name)
        return name


class Counts(NamedTuple):
    """Values of one label set: how many in each bucket, and their sum."""

    buckets: list[int]
    total: list[float]  # of one item, since it is written in place


_Table = dict[Hashable, Counts]


class Histogram:
    """A histogram with labels. The values of a bucket are at most its bound.

    A value that is recorded during `collect` may be in a bucket and not yet in the sum.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._local = threading.local()
        self._tables: list[tuple[threading.Thread, _Table]] = []
        self._ended: _Table = {}  # of threads that have ended
        self._lock = threading.Lock()  # of scrapes, and of threads that begin to record

    def record(self, labels: Hashable, value: float) -> None:
        """Count a value. In any thread."""
        try:
            table: _Table = self._local.table
        except AttributeError:
            table = self._new_table()
        counts = table.get(labels)
        if counts is None:
            counts = table[labels] = self._new_counts()
        counts.buckets[bisect_left(self.bounds, value)] += 1
        counts.total[0] += value

    def collect(self) -> _Table:
        """Return the sum of all threads' values for each label set. In any thread."""
        with self._lock:
            for thread, table in self._tables:
                if not thread.is_alive():
                    self._add(self._ended, table)
            self._tables = [each for each in self._tables if each[0].is_alive()]
            found: _Table = {}
            for table in (self._ended, *(table for _, table in self._tables)):
                self._add(found, table)
        return found

    def _new_table(self) -> _Table:
        table: _Table = {}
        self._local.table = table
        with self._lock:
            self._tables.append((threading.current_thread(), table))
        return table

    def _new_counts(self) -> Counts:
        return Counts([0] * (len(self.bounds) + 1), [0.0])

    def _add(self, to: _Table, table: _Table) -> None:
        for labels, counts in [*table.items()]:
            known = to.get(labels)
            if known is None:
                known = to[labels] = self._new_counts()
            for position, count in enumerate(counts.buckets):
                known.buckets[position] += count
            known.total[0] += counts.total[0]
