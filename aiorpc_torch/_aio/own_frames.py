"""Frames: which ones are of a user's code, and tracebacks without those of this library."""

import logging
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

log = logging.getLogger("aiorpc_torch")

LIBRARY = str(Path(__file__).parents[1])
_FOREIGN = (LIBRARY, sysconfig.get_path("stdlib"), "<", "uvloop/")  # no user's code
_INSTALLED = sysconfig.get_path("purelib")  # lies below the standard library


def is_of_user(file: str) -> bool:
    """Return whether a file is neither of this library nor of Python."""
    return file.startswith(_INSTALLED) or not file.startswith(_FOREIGN)


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that have called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def behind_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame on that is not of this library, None without one."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(LIBRARY):
        traceback = traceback.tb_next
    return traceback


def has_user_frames(traceback: TracebackType | None) -> bool:
    """Return whether a frame is neither of this library nor of Python."""
    frames = walk_tb(traceback)
    return any(is_of_user(frame.f_code.co_filename) for frame, _ in frames)


def keep_own_frames(exc: BaseException) -> None:
    """Log the frames of an exception that is shown without them, at level DEBUG."""
    log.debug("raised in this library: %r", exc, exc_info=exc)


def without_own_frames(exc: E) -> E:
    """Return an exception that this library has raised, without its traceback."""
    keep_own_frames(exc)
    return exc.with_traceback(None)
