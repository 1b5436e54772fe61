"""Reports of what a long wait waits for: one line on a terminal, else lines of the log.

On a terminal the line is overwritten when what is awaited changes, and erased at the end. Where the
program has set up logging, and in child processes, of which each would write a line, it is logged.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator

from .._text import printable

log = logging.getLogger("aiorpc_torch")

TERMINAL_DELAY = 2.0  # seconds of a wait after which a terminal shows what is awaited
LOG_DELAY = 10.0  # seconds until the log tells of a wait that may need the user
LONGEST_INTERVAL = 300.0  # seconds between two lines of the log that say the same
EARLY = 0.01  # seconds by which a timer may be early: uvloop's count whole milliseconds

_ERASE = "\r\x1b[K"


class WaitReport:
    """The report of one wait, which ends with the block.

    Args:
        level: level of the lines of the log.
        interval: seconds until the first line of the log. As long as nothing changes, each further
            one takes twice as long.
    """

    def __init__(self, level: int, interval: float) -> None:
        self._level = level
        self._first = self._interval = interval
        self._on_terminal = _is_terminal()
        self._began = self._told_at = time.monotonic()
        self._text = ""

    def __enter__(self) -> "WaitReport":
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal and self._text:
            _write(_ERASE)

    @property
    def pause(self) -> float:
        """Return the seconds until what is awaited should be found out again."""
        shows_nothing = self._on_terminal and not self._text
        return min(TERMINAL_DELAY, self._first) if shows_nothing else self._first

    def tell(self, text: str) -> None:
        """Report what is awaited, if it is time to. A peer may have chosen the text."""
        text, now = printable(text), time.monotonic()
        if self._on_terminal:
            if text != self._text and (self._text or now - self._began >= TERMINAL_DELAY - EARLY):
                self._text = text
                # The cursor stays in the first column: what is printed next overwrites the line.
                _write(f"{_ERASE}{text[: shutil.get_terminal_size().columns - 1]}\r")
            return
        if text != self._text:
            self._interval = self._first
        if now - self._told_at >= self._interval - EARLY:
            if text == self._text:
                self._interval = min(2 * self._interval, LONGEST_INTERVAL)
            self._told_at, self._text = now, text
            log.log(self._level, "%s", text)


@contextlib.contextmanager
def announced(
    text: str, level: int = logging.DEBUG, delay: float = LONGEST_INTERVAL
) -> Iterator[None]:
    """Report once what a wait of the running loop waits for.

    Args:
        text: what is awaited. A terminal shows it until the block ends.
        level: level of the line of the log.
        delay: seconds until that line.
    """
    with WaitReport(level, delay) as waiting:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(waiting.pause, waiting.tell, text)
        try:
            yield
        finally:
            timer.cancel()


def _is_terminal() -> bool:
    """Return whether this process shows its waits on a terminal."""
    is_quiet = log.hasHandlers() or multiprocessing.parent_process() is not None
    if is_quiet or os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # it is None, or closed
        return False


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
