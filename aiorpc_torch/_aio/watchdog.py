"""A watchdog: the process ends, with the stacks of its threads, if its event loop does not run.

`faulthandler` has a thread of its own, which needs no GIL: C code that keeps it is found, too. A
process has one such timer, so `faulthandler.dump_traceback_later` of others ends this watchdog.
"""

import asyncio
import contextlib
import faulthandler
import sys
from collections.abc import Iterator

RENEWALS = 8  # of the timer, in its time


@contextlib.contextmanager
def watchdog(seconds: float | None) -> Iterator[None]:
    """Print the stacks on stderr and end this process if the running loop stands for `seconds`.

    That is found an eighth of this time later at most, and never before.
    """
    if seconds is None:
        yield
        return
    renewal = _Renewal(seconds)
    renewal.run()
    try:
        yield
    finally:
        renewal.stop()


class _Renewal:
    def __init__(self, seconds: float) -> None:
        self._pause = seconds / RENEWALS
        self._seconds = seconds + self._pause  # the loop may have stood still since the renewal
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def run(self) -> None:
        # Not sys.stderr, which may be no file: a notebook's, say.
        faulthandler.dump_traceback_later(self._seconds, file=sys.__stderr__ or 2, exit=True)
        self._timer = self._loop.call_later(self._pause, self.run)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
