"""The lag of an event loop, measured from a thread: a blocked loop is seen while it is blocked."""

import asyncio
import functools
import threading
import time
from collections import deque

INTERVAL = 1.0  # seconds between two probes
WINDOW = 15.0  # seconds over which the longest lag is reported: a usual scrape interval


class LoopLag:
    """A daemon thread that asks a loop for an answer once a second, from `start` to `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float = INTERVAL) -> None:
        self._loop = loop
        self._interval = interval
        self._lags: deque[tuple[float, float]] = deque(maxlen=int(WINDOW / interval) + 1)
        self._asked: float | None = None  # of the probe without an answer
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aiorpc-loop-lag", daemon=True)

    def start(self) -> None:
        """Start to measure."""
        self._thread.start()

    def close(self) -> None:
        """Stop to measure."""
        self._is_closed.set()
        self._thread.join()

    def longest(self) -> float:
        """Return the longest lag in seconds of the last `WINDOW` seconds. In any thread."""
        now, asked = time.monotonic(), self._asked
        lags = [lag for at, lag in [*self._lags] if now - at <= WINDOW]
        return max(*lags, 0.0, 0.0 if asked is None else now - asked)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            if self._asked is None:
                self._asked = asked = time.monotonic()
                try:
                    self._loop.call_soon_threadsafe(functools.partial(self._answer, asked))
                except RuntimeError:  # the loop has ended
                    self._asked = None
                    return
            self._is_closed.wait(self._interval)

    def _answer(self, asked: float) -> None:
        now = time.monotonic()
        self._lags.append((now, now - asked))
        self._asked = None
