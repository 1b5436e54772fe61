"""The interceptor that counts calls for the metrics: durations, waits and batch sizes.

Histograms have no locks: each thread counts in tables of its own, which a scrape adds up.
"""

import functools
import threading
import time
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from contextvars import Context
from typing import NamedTuple

from .._text import printable
from . import CallInfo, Interceptor

SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

MAX_METHODS, MAX_PEERS, MAX_ERRORS = 200, 100, 50  # names in labels; the rest is "other"


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
            table = self._local.table = {}
            with self._lock:
                self._tables.append((threading.current_thread(), table))
        counts = table.get(labels)
        if counts is None:
            counts = table[labels] = self._new_counts()
        counts.buckets[bisect_left(self.bounds, value)] += 1
        counts.total[0] += value

    def collect(self) -> _Table:
        """Return the sum of all threads' values for each label set. In any thread."""
        found: _Table = {}
        with self._lock:
            tables, self._tables = self._tables, []
            for thread, table in tables:
                if thread.is_alive():
                    self._tables.append((thread, table))
                    self._add(found, table)
                else:
                    self._add(self._ended, table)
            self._add(found, self._ended)
        return found

    def _new_counts(self) -> Counts:
        return Counts([0] * (len(self.bounds) + 1), [0.0])

    def _add(self, to: _Table, table: _Table) -> None:
        for labels, counts in [*table.items()]:
            known = to.setdefault(labels, self._new_counts())
            for position, count in enumerate(counts.buckets):
                known.buckets[position] += count
            known.total[0] += counts.total[0]


class Recorder(Interceptor):
    """Histograms of the calls of this process. Labels are tuples.

    Attributes:
        client: seconds of calls made here, by method, peer and error type ("" for none).
        server: seconds of calls received here, by method, peer and error type.
        queue: seconds from a call's arrival to its start or to its joining a batch, by method.
        batch: seconds of batches, by method and error type.
        batch_wait: seconds that the oldest call of a batch has waited, by method.
        batch_size: calls of batches, by method.
        worker: name of this worker, "" before the first call.
    """

    def __init__(self) -> None:
        self.client, self.server, self.queue = (Histogram(SECONDS) for _ in range(3))
        self.batch, self.batch_wait = Histogram(SECONDS), Histogram(SECONDS)
        self.batch_size = Histogram(SIZES)
        self.worker = ""
        self._method, self._peer = NameLimit(MAX_METHODS), NameLimit(MAX_PEERS)
        self._error = NameLimit(MAX_ERRORS)

    def on_call(self, call: CallInfo) -> "functools.partial[None] | None":
        """Time a call; groups and maps are counted by their members' calls."""
        if not call.peer:
            return None
        self.worker = call.worker
        labels = self._method(call.method), self._peer(call.peer)
        return functools.partial(self._end, self.client, labels, call.began)

    def on_receive(self, call: CallInfo) -> "functools.partial[None]":
        """Time a received call, and note how long it has waited."""
        self.worker = call.worker
        labels = self._method(call.method), self._peer(call.peer)
        self.queue.record(labels[:1], time.monotonic() - call.began)
        return functools.partial(self._end, self.server, labels, call.began)

    def on_batch(self, batch: CallInfo, callers: Sequence[Context]) -> "functools.partial[None]":
        """Time a batch, and note its size and its wait."""
        labels, now = (self._method(batch.method),), time.monotonic()
        self.batch_size.record(labels, batch.size)
        self.batch_wait.record(labels, now - batch.began)
        return functools.partial(self._end, self.batch, labels, now)

    def _end(
        self,
        histogram: Histogram,
        labels: tuple[str, ...],
        began: float,
        failure: BaseException | None,
    ) -> None:
        error = "" if failure is None else self._error(printable(type(failure).__qualname__))
        histogram.record((*labels, error), time.monotonic() - began)
