"""Event loops that stand: their lag, a warning from another thread, and the end of the process.

torch is known here by the names of its modules alone: a collective of `torch.distributed` on the
event loop waits for the other ranks, whose calls to this one wait in turn.
"""

import asyncio
import contextlib
import faulthandler
import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from types import CodeType, FrameType

from .loops import call_soon
from .own_frames import is_of_user, outwards
from .places import is_at_lock

log = logging.getLogger("aiorpc_torch")

LOOK_INTERVAL = 1.25  # seconds between two looks at the loop
LOOKS = 4  # in a row that find it standing: for 5 to 6.25 s
_QUIET = 60.0  # seconds between two warnings of one place
_MAX_PLACES = 1024  # places that are remembered
_COLLECTIVES = ("torch.distributed.", "torch.nn.parallel.")
_DECORATORS = ("torch.distributed.c10d_logger",)
RENEWALS = 8  # of the timer of `watchdog`, in its time


class LoopLag:
    """Measures how late an event loop runs what another thread schedules.

    `probe` schedules a callback unless one is scheduled: a blocked loop gets one only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sent: float | None = None
        self._lags: deque[tuple[float, float]] = deque(maxlen=256)  # time and seconds

    def probe(self) -> None:
        """Schedule a callback on the loop, unless one is scheduled."""
        if self._sent is None:
            self._sent = time.monotonic()
            call_soon(self._loop, self._arrive)

    def _arrive(self) -> None:
        if self._sent is not None:
            now = time.monotonic()
            self._lags.append((now, now - self._sent))
            self._sent = None

    def blocked_for(self) -> float:
        """Return for how many seconds the loop has not run the last callback, 0.0 if it has."""
        sent = self._sent
        return 0.0 if sent is None else time.monotonic() - sent

    def longest(self, seconds: float) -> float:
        """Return the longest lag of the last `seconds`, the present one included."""
        since = time.monotonic() - seconds
        lags = [lag for at, lag in [*self._lags] if at >= since]
        return max([self.blocked_for(), *lags])


class StallWatch:
    """Warns of a loop that did not run between `LOOKS` looks. `look` at any rate, in one thread.

    Looks, and not a time: a process that was frozen has one when it thaws. `thread` is the
    identifier of the loop's thread, `name` the worker's.
    """

    def __init__(self, lag: LoopLag, thread: int, name: str) -> None:
        self._lag, self._thread, self._name = lag, thread, name
        self._next = 0.0
        self._looks = 0  # that have found the loop standing
        self._warned: dict[tuple[CodeType, int], float] = {}

    def look(self, now: float) -> bool:
        """Probe the loop, or warn that it has not run for some looks.

        Return False if the last look was a moment ago.
        """
        if now < self._next:
            return False
        self._next = now + LOOK_INTERVAL
        blocked = self._lag.blocked_for()
        self._looks = self._looks + 1 if blocked > LOOK_INTERVAL / 2 else 0
        if self._looks == LOOKS and (frame := sys._current_frames().get(self._thread)) is not None:
            self._warn(frame, blocked, now)
        self._lag.probe()
        return True

    def _warn(self, frame: FrameType, seconds: float, now: float) -> None:
        frames = [*outwards(frame)]
        at = next((n for n, each in enumerate(frames) if _is_of_program(each)), 0)
        place = (frames[at].f_code, frames[at].f_lineno)
        if now - self._warned.get(place, -_QUIET) < _QUIET:
            return
        if len(self._warned) >= _MAX_PLACES:
            self._warned.clear()
        self._warned[place] = now
        collective = _collective(frames[:at])
        log.warning(
            "the event loop of %r has stood for %.0f s in %s (%s:%d): it serves no call meanwhile. "
            "%s",
            self._name,
            seconds,
            collective or place[0].co_qualname,
            place[0].co_filename,
            place[1],
            _remedy(frame, collective),
        )


def _remedy(frame: FrameType, collective: str) -> str:
    if is_at_lock(frame):
        why = "A lock that a coroutine has across an `await` must be an `asyncio.Lock`. Else run"
    elif collective:
        why = "A collective waits for all ranks, whose calls to this worker may wait. Run"
    else:
        why = "Run"
    return f"{why} that in a thread: `await asyncio.to_thread(...)`, or a plain `def` method"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_of_program(frame: FrameType) -> bool:
    """Return whether a frame is of a user's code, and not of torch."""
    file = frame.f_code.co_filename
    return (is_of_user(file) or file == "<string>") and _module(frame).partition(".")[0] != "torch"


def _collective(frames: list[FrameType]) -> str:
    """Return the function of torch.distributed that a user's code has called, "" if none."""
    for frame in reversed(frames):
        module = _module(frame)
        if module.startswith(_COLLECTIVES) and module not in _DECORATORS:
            return f"{module.removesuffix('.distributed_c10d')}.{frame.f_code.co_qualname}"
    return ""


@contextlib.contextmanager
def watchdog(seconds: float | None) -> Iterator[None]:
    """Print the stacks on stderr and end this process if the running loop stands for `seconds`.

    That is found an eighth of this time later at most, and never before. `faulthandler` has a
    thread of its own, which needs no GIL: C code that keeps it is found, too. A process has one
    such timer, so `faulthandler.dump_traceback_later` of others ends this watchdog.
    """
    if seconds is None:
        yield
        return
    loop = asyncio.get_running_loop()
    pause = seconds / RENEWALS
    limit = seconds + pause  # the loop may have stood still since the renewal
    timer: asyncio.TimerHandle

    def renew() -> None:
        nonlocal timer
        # Not sys.stderr, which may be no file: a notebook's, say.
        faulthandler.dump_traceback_later(limit, file=sys.__stderr__ or 2, exit=True)
        timer = loop.call_later(pause, renew)

    renew()
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
