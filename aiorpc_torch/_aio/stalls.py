"""A warning for each stall of an event loop, from another thread while the loop stands.

torch is known here by the names of its modules alone: a collective of `torch.distributed` on the
event loop waits for the other ranks, whose calls to this one wait in turn.
"""

import logging
import sys
from types import CodeType, FrameType

from .loop_lag import LoopLag, is_of_user, outwards
from .places import is_at_lock

log = logging.getLogger("aiorpc_torch")

LOOK_INTERVAL = 1.25  # seconds between two looks at the loop
LOOKS = 4  # in a row that find it standing: for 5 to 6.25 s
_QUIET = 60.0  # seconds between two warnings of one place
_MAX_PLACES = 1024  # places that are remembered
_COLLECTIVES = ("torch.distributed.", "torch.nn.parallel.")
_DECORATORS = ("torch.distributed.c10d_logger",)


class StallWatch:
    """Warns of a loop that did not run between `LOOKS` looks. `look` at any rate, in one thread.

    Looks, and not a time: a process that was frozen has one when it thaws.

    Args:
        lag: the lag of the loop, which this probes.
        thread: identifier of the loop's thread.
        name: name of the worker.
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
