"""The interceptor that counts calls for the metrics: durations, waits and batch sizes."""

import functools
import time
from collections.abc import Sequence
from contextvars import Context

from .._text import printable
from . import CallInfo, Interceptor
from .histograms import Histogram, NameLimit

SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

MAX_METHODS, MAX_PEERS, MAX_ERRORS = 200, 100, 50  # names in labels; the rest is "other"


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
        return functools.partial(self._end, self.client, call, self._peer(call.peer))

    def on_receive(self, call: CallInfo) -> "functools.partial[None]":
        """Time a received call, and note how long it has waited."""
        self.worker = call.worker
        self.queue.record((self._method(call.method),), time.monotonic() - call.began)
        return functools.partial(self._end, self.server, call, self._peer(call.peer))

    def on_batch(self, batch: CallInfo, callers: Sequence[Context]) -> "functools.partial[None]":
        """Time a batch, and note its size and its wait."""
        method, now = self._method(batch.method), time.monotonic()
        self.batch_size.record((method,), batch.size)
        self.batch_wait.record((method,), now - batch.began)
        return functools.partial(self._end_batch, method, now)

    def _end(
        self, histogram: Histogram, call: CallInfo, peer: str, failure: BaseException | None
    ) -> None:
        labels = self._method(call.method), peer, self._type(failure)
        histogram.record(labels, time.monotonic() - call.began)

    def _end_batch(self, method: str, began: float, failure: BaseException | None) -> None:
        self.batch.record((method, self._type(failure)), time.monotonic() - began)

    def _type(self, failure: BaseException | None) -> str:
        return "" if failure is None else self._error(printable(type(failure).__qualname__))
