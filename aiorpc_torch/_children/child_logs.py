"""Output of children with their names: `logs="names"` of local worlds.

Children write to pipes, so what C++ prints and what is written just before a crash has a name, too.
A daemon thread of the parent reads the pipes and prints whole lines. It needs no event loop.
Where stdout and stderr of the parent are one file, a child has one pipe: the order is kept.
"""

import contextlib
import multiprocessing
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

from .._aio.fork import close_on_fork
from .._text import printable

STDOUT, STDERR = 1, 2
LONGEST = 1 << 16  # bytes of a line; a longer one is printed in parts
LAST_LINES, LAST_LENGTH = 20, 300  # lines of a child that its error has, and characters of each
MOST_READS = 64  # at once from one child, so that the others have their turn
PROMPT_DELAY = 0.5  # seconds after which a line without an end is shown on a terminal
CLOSE_TIMEOUT = 2.0  # seconds for the last lines of a world to be printed

Outputs = tuple[Connection, ...]
"""The pipe for both streams of a child, or the pipes for its stdout and its stderr."""


class Lines:
    """A splitter of bytes into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        return [_as_shown(line) for line in lines]

    def take_rest(self) -> bytes:
        """Return the line that has no end yet."""
        rest, self._rest = self._rest, b""
        return _as_shown(rest)


def _as_shown(line: bytes) -> bytes:
    """Return what a terminal shows of a line: the text after the last return to its start."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Printer:
    """Prints the lines of several children to this process's streams. Used in one thread."""

    def __init__(self) -> None:
        self._open: tuple[str, int] | None = None  # the line that has no end yet: whose, and where

    def print(self, name: str, stream: int, lines: list[bytes], rest: bytes = b"") -> None:
        """Print whole lines of the child `name`, then a line without its end."""
        found = b""
        if self._open is not None and self._open != (name, stream):
            found, self._open = b"\n", None
        prefix = f"[{name}] ".encode()
        for line in lines:
            found += (b"" if self._open else prefix) + line + b"\n"
            self._open = None
        if rest:
            found += (b"" if self._open else prefix) + rest
            self._open = name, stream
        _write(stream, found)


def _write(stream: int, data: bytes) -> None:
    """Write to a stream of this process, which may be closed, or not block."""
    while data:
        try:
            data = data[os.write(stream, data) :]
        except BlockingIOError:
            select.select([], [stream], [])
        except OSError:  # its reader has gone
            return


class _Source:
    """The reading end of a child's pipe. Any thread may `pump`; one prints."""

    def __init__(self, name: str, stream: int, last: deque[str]) -> None:
        self.name = name
        self.stream = stream
        self.has_ended = False
        self.reader, self.writer = multiprocessing.Pipe(duplex=False)
        self._lines = Lines()
        self._last = last
        self._lock = threading.Lock()
        self._read: deque[bytes] = deque()  # complete lines that are not printed
        self._fed_at = 0.0
        self.awaits_end = False  # there may be a line without an end, at a terminal
        os.set_blocking(self.reader.fileno(), False)
        close_on_fork(self.reader)
        close_on_fork(self.writer)

    def pump(self) -> None:
        """Read what has come."""
        with self._lock:
            for _ in range(MOST_READS):
                if self.has_ended:
                    return
                try:
                    data = os.read(self.reader.fileno(), 1 << 16)
                except BlockingIOError:
                    return
                except OSError:
                    data = b""
                self._take(self._lines.feed(data))
                self._fed_at, self.awaits_end = time.monotonic(), os.isatty(self.stream)
                if not data:
                    self.has_ended = True
                    self._take([rest] if (rest := self._lines.take_rest()) else [])

    def _take(self, lines: list[bytes]) -> None:
        self._read.extend(lines)
        self._last.extend(printable(line.decode(errors="replace"), LAST_LENGTH) for line in lines)

    def print(self, printer: Printer) -> None:
        """Print what was read; a line without an end too, if it has waited on a terminal."""
        with self._lock:
            lines, rest = [*self._read], b""
            self._read.clear()
            waited = time.monotonic() - self._fed_at
            if self.awaits_end and waited >= PROMPT_DELAY:
                rest, self.awaits_end = self._lines.take_rest(), False
        if lines or rest:
            printer.print(self.name, self.stream, lines, rest)

    def close_writer(self) -> None:
        """Close the child's end in this process."""
        with self._lock:  # the thread closes both once it has read the end
            self.writer.close()

    def close(self) -> None:
        """Close this process's ends."""
        with self._lock:
            self.has_ended = True
            self.reader.close()
            self.writer.close()


class ChildOutput:
    """The output of one child, from its start to its end; `wake` lets the thread print it."""

    def __init__(self, name: str, wake: Callable[[], None], *, is_one_file: bool) -> None:
        self._name = name
        self._wake = wake
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        streams = (STDOUT,) if is_one_file else (STDOUT, STDERR)
        self.sources = [_Source(name, each, self._last) for each in streams]

    @property
    def writers(self) -> Outputs:
        """Return the ends for the child."""
        return tuple(each.writer for each in self.sources)

    def started(self) -> None:
        """Close the ends of the child in this process: the child has them."""
        for each in self.sources:
            each.close_writer()

    def note(self) -> str:
        """Return the text of the last lines of a child that has ended, "" without any."""
        for each in self.sources:
            each.pump()
        self._wake()
        lines = "\n".join(f"  {line}" for line in [*self._last])
        return f"the last lines of worker {self._name!r}:\n{lines}" if lines else ""


class LogReader:
    """The thread that prints the output of all children of a world, until `close`."""

    def __init__(self) -> None:
        self._is_one_file = _is_same_file(STDOUT, STDERR)
        self._sources: list[_Source] = []
        self._printer = Printer()
        self._woken, self._wake = multiprocessing.Pipe(duplex=False)
        close_on_fork(self._woken)
        close_on_fork(self._wake)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="aiorpc-logs", daemon=True)
        self._thread.start()

    def open(self, name: str) -> ChildOutput:
        """Return the output of a child that is about to start."""
        found = ChildOutput(name, self._rouse, is_one_file=self._is_one_file)
        self._sources.extend(found.sources)
        self._rouse()
        return found

    def close(self) -> None:
        """Print what the children have written, and end the thread. It blocks."""
        self._is_closing = True
        self._rouse()
        self._thread.join(CLOSE_TIMEOUT)

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended
            self._wake.send_bytes(b".")

    def _run(self) -> None:
        with contextlib.closing(self._woken), contextlib.closing(self._wake):
            while not self._is_closing:
                every = [each for each in [*self._sources] if not each.has_ended]
                poller = select.poll()
                for descriptor in (self._woken, *(each.reader for each in every)):
                    poller.register(descriptor, select.POLLIN)
                awaits = any(each.awaits_end for each in every)
                poller.poll(PROMPT_DELAY * 1000 if awaits else None)
                while self._woken.poll():
                    self._woken.recv_bytes()
                self._print()
            self._print()
            for each in self._sources:
                each.close()

    def _print(self) -> None:
        for each in [*self._sources]:
            if not each.has_ended:
                each.pump()
            has_ended = each.has_ended  # before: `note` may read the last lines meanwhile
            each.print(self._printer)
            if has_ended:
                self._sources.remove(each)
                each.close()


def _is_same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # one is closed
        return False


def use_outputs(outputs: Outputs) -> None:
    """Let this process, a child, write to its pipes if it has some, and each line at its end.

    Python would keep the lines for a pipe, as also a notebook's stdout is.
    """
    for stream in (sys.stdout, sys.stderr):
        # None, closed, or another one
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if outputs:
        os.dup2(outputs[0].fileno(), STDOUT)
        os.dup2(outputs[-1].fileno(), STDERR)
    for each in outputs:
        each.close()
