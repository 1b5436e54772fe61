"""Worker processes of one cell: fork them, send them commands, and wait until they end.

Each process is a worker as torchrun would start it. No supervisor watches it, and it must end by
itself, as an interpreter does. This module imports no torch and starts no thread, since it forks.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

PATIENCE = 20.0  # seconds for any expected event
BAD_WORDS = ("terminate called", "Fatal Python error", "core dumped", "never retrieved")

Life = Callable[[int, int, dict[str, Any]], None]


class Wrong(Exception):
    """A process did not do what it was told."""


def fork(live: Callable[[], None], errors: Path | None = None) -> int:
    """Run `live` in a new process that ends as an interpreter does; return its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    _live(live, errors)


def _live(live: Callable[[], None], errors: Path | None) -> NoReturn:
    code = 1
    if errors is not None:
        file = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 2)
    try:
        live()
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        traceback.print_exc()
    # Not os._exit: the cell also tests how torch's threads and statics end with the process.
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("Py_Exit returned")


class Member:
    """A worker process that obeys commands and reports events, in lines of JSON."""

    def __init__(self, name: str, live: Life, given: dict[str, Any], folder: Path) -> None:
        self.name = name
        self.code: int | None = None
        self._errors = folder / f"{name}.err"
        heard, told = os.pipe()
        read, write = os.pipe()
        self.pid = fork(lambda: live(heard, write, given), self._errors)
        os.close(heard)
        os.close(write)
        self._told, self._read = os.fdopen(told, "w"), os.fdopen(read, "rb", buffering=0)
        self._text = b""

    def __repr__(self) -> str:
        return f"<Member {self.name} {self.pid}, {self.code}>"

    def tell(self, word: str, *given: Any) -> None:
        """Send a command to the process."""
        with contextlib.suppress(BrokenPipeError):
            self._told.write(json.dumps([word, *given]) + "\n")
            self._told.flush()

    def hears(self, what: str, within: float = PATIENCE) -> Any:
        """Return the value of the next event, which must be `what`."""
        end = time.monotonic() + within
        while b"\n" not in self._text:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise Wrong(f"{self.name} did not say {what!r} within {within:g} s")
            data = os.read(self._read.fileno(), 65536)
            if not data:
                raise Wrong(f"{self.name} ended in place of {what!r}: {self.errors()[-600:]}")
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        event, value = json.loads(line)
        if event != what:
            raise Wrong(f"{self.name} said {event} {value} in place of {what!r}")
        return value

    def asks(self, word: str, *given: Any, within: float = PATIENCE) -> Any:
        """Send a command and return the value of its answer."""
        self.tell(word, *given)
        return self.hears(word, within)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ends(self, within: float = PATIENCE) -> int:
        """Wait until the process ends by itself; return its exit code, negative for a signal."""
        end = time.monotonic() + within
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                raise Wrong(f"{self.name} did not end within {within:g} s")
            else:
                time.sleep(0.01)
        return self.code

    def errors(self) -> str:
        """Return the text that the process wrote to stderr."""
        return self._errors.read_text(errors="replace")

    def wrongs(self, code: int) -> Iterator[str]:
        """Yield the ways in which the process did not end by itself with exit code `code`."""
        found = self.ends()
        text = self.errors()
        if found != code:
            yield f"{self.name} ended with code {found}, not {code}: {text[-600:]}"
        for word in [*BAD_WORDS, *(["Traceback"] if code == 0 else [])]:
            if word in text:
                start = max(0, text.index(word) - 200)
                yield f"{self.name} wrote: {text[start : start + 1500]}"

    def close(self) -> None:
        """End the process, in whatever state it is."""
        if self.code is None:
            for number in (signal.SIGKILL, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)
            os.waitpid(self.pid, 0)
        self._read.close()
        with contextlib.suppress(BrokenPipeError):
            self._told.close()


def adopt() -> None:
    """Make this process the parent of descendants whose own parent ends."""
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER


def left_over() -> list[int]:
    """Kill the child processes that should have ended; return their pids."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if not pid:
                children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
                found += [int(child) for child in children]
                for child in children:
                    os.kill(int(child), signal.SIGKILL)
                    os.waitpid(int(child), 0)
    return found


# ── two machines on this one ────────────────────────────────────────────────────────────────────

_NEWNET = 0x40000000  # CLONE_NEWNET
LINK = "v0"  # the name of either end of the link


class Machines:
    """Two network namespaces with a link between them. Only root may make them."""

    def __init__(self) -> None:
        self._keepers = [self._new(), self._new()]
        one, other = (keeper.pid for keeper in self._keepers)
        self._ip(0, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", f"{other}")
        for number, _ in enumerate((one, other)):
            self._ip(number, "link", "set", "lo", "up")
            self._ip(number, "address", "add", f"10.93.7.{number + 1}/24", "dev", LINK)
            self._ip(number, "link", "set", LINK, "up")
        for number in range(2):
            self._await_carrier(number)

    def _await_carrier(self, number: int) -> None:
        """Wait until the link is up.

        Linux reports it up to a second later. Until then TensorPipe takes another interface.
        """
        end = time.monotonic() + PATIENCE
        while "state UP" not in self._ip(number, "link", "show", LINK):
            if time.monotonic() > end:
                raise Wrong(f"{LINK} does not come up")
            time.sleep(0.02)

    def _new(self) -> "subprocess.Popen[bytes]":
        keeper = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo in; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"in\n"
        return keeper

    def _ip(self, number: int, *words: str) -> str:
        where = ["nsenter", f"--net=/proc/{self._keepers[number].pid}/ns/net"]
        command = [*where, "ip", *words]
        done = subprocess.run(command, check=True, timeout=PATIENCE, stdout=subprocess.PIPE)
        return done.stdout.decode()

    def cut(self) -> None:
        """Take the link down."""
        self._ip(1, "link", "set", LINK, "down")

    def whole(self) -> None:
        """Bring the link up again."""
        self._ip(1, "link", "set", LINK, "up")
        for number in range(2):
            self._await_carrier(number)

    def inside(self, number: int) -> str:
        """Return the path of that namespace, for `enter`."""
        return f"/proc/{self._keepers[number].pid}/ns/net"

    def close(self) -> None:
        for keeper in self._keepers:
            with keeper:
                keeper.kill()


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts, into that network namespace."""
    with open(namespace) as file:
        assert ctypes.CDLL(None).setns(file.fileno(), _NEWNET) == 0


def no_machines() -> str:
    """Return why network namespaces cannot be made here; empty if they can."""
    words = ["unshare", "--net", "ip", "link", "add", LINK, "type", "veth", "peer", "name", "v1"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stderr.strip()
    except OSError as exc:
        return str(exc)
