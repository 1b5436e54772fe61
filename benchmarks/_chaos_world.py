"""The roles of examples/week.py on four hosts, each under a supervisor, and what they print."""

import contextlib
import itertools
import json
import math
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from ._hosts import Host, hosts

PLACES = {"keeper": 0, "learner": 1, "replay": 2, "actor0": 2, "evaluator": 3, "actor1": 3}
"""Roles, each with the number of its host."""

WORK = {
    "keeper": "holds",
    "learner": "version",
    "replay": "queued",
    "actor0": "sent",
    "actor1": "sent",
    "evaluator": "evaluated",
}
"""The word of the line that a role prints when it works."""

PROGRAM = "benchmarks._chaos_role"

# All in seconds.
HEARTBEAT = 2.0
SILENT = 3.0  # of a freeze or a cut: longer than the heartbeat
WATCHDOG = 4.0  # longer than a freeze, after which the process goes on


class Line(NamedTuple):
    """A line that a process has printed."""

    at: float  # seconds since the start of the program
    role: str
    values: dict[str, Any]


class Record:
    """All lines of a run, by role, in the order in which they came."""

    def __init__(self) -> None:
        self.lines: dict[str, list[Line]] = {role: [] for role in PLACES}
        self._changed = threading.Condition()
        self._start = time.monotonic()

    def now(self) -> float:
        """Return the seconds since the start of the program."""
        return time.monotonic() - self._start

    def add(self, role: str, values: dict[str, Any]) -> None:
        """Add a line that came now."""
        with self._changed:
            self.lines[role].append(Line(self.now(), role, values))
            self._changed.notify_all()

    def since(self, at: float, role: str, word: str) -> list[Line]:
        """Return the lines of a role that have this word, since that time."""
        later = itertools.takewhile(lambda line: line.at >= at, reversed([*self.lines[role]]))
        return [line for line in later if word in line.values][::-1]

    def last(self, role: str, word: str, until: float = math.inf) -> Line | None:
        """Return the last line of a role that has this word, until that time."""
        lines = reversed([*self.lines[role]])
        return next((line for line in lines if line.at <= until and word in line.values), None)

    def works(self, role: str, since: float) -> list[Line]:
        """Return the lines that a role prints when it works, since that time."""
        return self.since(since, role, WORK[role])

    def wait(self, is_so: Callable[[], object], seconds: float) -> bool:
        """Wait until it is so; return False if it is not after so many seconds."""
        with self._changed:
            return bool(self._changed.wait_for(is_so, seconds))


class World:
    """The processes of a run on some machines, and what can happen to them.

    Args:
        folder: folder of the place where the roles meet, and of what they write to stderr.
        words: options of the program.
    """

    faults: tuple[str, ...] = "kill", "freeze", "cut", "drain", "hang"
    deaths: tuple[str, ...] = "kill", "drain", "hang"
    """Those of them after which there is another process."""
    last: tuple[str, ...] = ("kill",)
    """Faults of all at once, at the end of a run."""
    patience = 60.0
    """Seconds until a role is back; nobody waits as long."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.record = Record()
        for role in PLACES:
            errors = (folder / f"{role}.log").open("w")
            given = (role, "--place", f"file://{folder}/week", *words)
            process = self._loop(role, given, errors)
            threading.Thread(target=self._read, args=(role, process), daemon=True).start()

    def _loop(self, role: str, words: Sequence[str], errors: IO[str]) -> "subprocess.Popen[str]":
        """Start a role on its machine, again whenever it fails."""
        raise NotImplementedError

    def _run(self, role: str, *words: str) -> None:
        """Run a command on the machine of a role."""
        raise NotImplementedError

    def _read(self, role: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for text in process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # a line that was cut off by a death
                self.record.add(role, json.loads(text))

    def _signal(self, name: str, role: str) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # it has just ended by itself
            self._run(role, "kill", f"-{name}", str(self._pid(role)))

    def _pid(self, role: str) -> int:
        """Return the number of a role's process on its machine."""
        entered = self.record.last(role, "pid")
        assert entered is not None
        found: int = entered.values["pid"]
        return found

    def dump(self) -> None:
        """Let all processes write where they stand: one of them does not work."""
        for role in PLACES:
            self._signal("USR2", role)

    def kill(self, role: str) -> None:
        """Kill a process, as the kernel does that has no memory left."""
        self._signal("KILL", role)

    def drain(self, role: str) -> None:
        """Let a process leave in order."""
        self._signal("TERM", role)

    def hang(self, role: str) -> None:
        """Let a process hang while it has the GIL."""
        self._signal("USR1", role)

    def freeze(self, role: str) -> None:
        """Stop a process for longer than its heartbeat."""
        self._signal("STOP", role)
        time.sleep(SILENT)
        self._signal("CONT", role)


class OnHosts(World):
    """The same on hosts of this machine."""

    def __init__(self, machines: list[Host], folder: Path, *words: str) -> None:
        self._hosts = {role: machines[number] for role, number in PLACES.items()}
        super().__init__(folder, *words)

    def _loop(self, role: str, words: Sequence[str], errors: IO[str]) -> "subprocess.Popen[str]":
        return self._hosts[role].loop(PROGRAM, *words, stdout=subprocess.PIPE, stderr=errors)

    def _run(self, role: str, *words: str) -> None:
        self._hosts[role].run(*words)

    def cut(self, role: str) -> None:
        """Drop all packets of a role's host for longer than its heartbeat."""
        with self._hosts[role].without_packets():
            time.sleep(SILENT)


@contextlib.contextmanager
def world(folder: Path, *words: str) -> Iterator[World]:
    """Start the program on four hosts; at the end all of its processes are killed."""
    with hosts(4) as machines:
        yield OnHosts(machines, folder, *words)
