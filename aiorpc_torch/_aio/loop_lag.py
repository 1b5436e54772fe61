"""The lag of an event loop and the stack of its thread, seen from another thread."""

import asyncio
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from .loops import call_soon
from .tasks import warn_if_blocking

MOST_FRAMES = 40
_LIBRARY = str(Path(__file__).parents[1])
_FOREIGN = (_LIBRARY, sysconfig.get_path("stdlib"), "<", "uvloop/")  # no user's code
_INSTALLED = sysconfig.get_path("purelib")  # lies below the standard library


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


class ThreadStack(NamedTuple):
    """The stack of a thread.

    Attributes:
        function: name of the method that runs, or of the innermost function of a user's code.
        frames: its frames as text, the innermost first.
    """

    function: str
    frames: Sequence[str]


def stack_of_thread(thread: int) -> ThreadStack | None:
    """Return the stack of the thread with that identifier, None if it has ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    frames = [*outwards(frame)]
    return ThreadStack(_running_function(frames), [*map(_describe, frames[:MOST_FRAMES])])


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that have called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _running_function(frames: Sequence[FrameType]) -> str:
    for frame in frames:
        if frame.f_code is warn_if_blocking.__code__:  # a coroutine of ours: it has a name
            return str(frame.f_locals.get("name", "?"))
    own = (each for each in frames if is_of_user(each.f_code.co_filename))
    return next(own, frames[0]).f_code.co_qualname


def is_of_user(file: str) -> bool:
    """Return whether a file is neither of this library nor of Python."""
    return file.startswith(_INSTALLED) or not file.startswith(_FOREIGN)


def _describe(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
