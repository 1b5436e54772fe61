"""The lag of an event loop, measured from a thread: a blocked loop is seen while it is blocked."""

import asyncio
import threading

from .._aio.loop_lag import LoopLag

INTERVAL = 1.0  # seconds between two probes
WINDOW = 15.0  # seconds over which the longest lag is reported: a usual scrape interval


class LagThread:
    """A daemon thread that probes a loop once a second, from `start` to `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float = INTERVAL) -> None:
        self._loop = loop
        self._interval = interval
        self._lag = LoopLag(loop)
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
        return 0.0 if self._loop.is_closed() else self._lag.longest(WINDOW)

    def _run(self) -> None:
        while not self._loop.is_closed():
            self._lag.probe()
            if self._is_closed.wait(self._interval):
                return
