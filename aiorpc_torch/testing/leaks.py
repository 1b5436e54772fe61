"""What a test leaves behind: tasks, pending calls, threads of ours, processes, a world.

Finds it by looking before and after. Objects that RRefs hold are not looked at: torch tells an
owner of dropped RRefs in a process's first world only (2.13 and 2.15), in which few tests are.
"""

import asyncio
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .._protocol import endpoints
from .._protocol.endpoints import Endpoint
from .._stats import stats
from .forkserver import helpers

__all__ = ("no_leaks",)

Process = tuple[int, str]  # its pid, and when it started: pids are used again

# Seconds for what is ending to end.
THREADS = 1.0
PROCESSES = 2.0


@contextlib.asynccontextmanager
async def no_leaks() -> AsyncIterator[None]:
    """Fail if what began in this block is still there at its end.

    Looked for are tasks of the running loop, calls that nobody has an answer to yet, threads of
    this library, child processes, whoever started them, and a world that was left open. What is
    about to end gets a moment: tasks a few turns of the loop, threads a second, processes two.

    Raises:
        AssertionError: names each thing that is left. An exception of the block goes first.
    """
    tasks, before = asyncio.all_tasks(), Stock.take()
    yield
    check([*await tasks_left(tasks), *before.left()])


def check(left: Iterable[str]) -> None:
    """Nothing is left.

    Raises:
        AssertionError: if something is; it names each.
    """
    if found := list(left):
        raise AssertionError("left behind: " + "; ".join(found))


@dataclass(frozen=True)
class Stock:
    """What there is now, tasks aside."""

    world: Endpoint | None
    calls: int
    threads: frozenset[threading.Thread]
    processes: frozenset[Process]

    @classmethod
    def take(cls) -> "Stock":
        """Look around."""
        return cls(endpoints.serving(), stats().in_flight, _threads(), frozenset(_children()))

    def left(self) -> list[str]:
        """What there is now and was not then, in words."""
        return [*self.calls_left(), *self._world_left(), *self._threads_left(), *self._children()]

    def calls_left(self) -> Iterator[str]:
        """Calls that are pending now and were not then."""
        pending = stats().in_flight - self.calls
        if pending > 0:
            yield f"{pending} pending call{'s' * (pending > 1)}"

    def _world_left(self) -> Iterator[str]:
        if endpoints.serving() not in (None, self.world):
            yield "a world that was not left"

    def _threads_left(self) -> Iterator[str]:
        if endpoints.serving() is not None:
            return  # they are its
        end = time.monotonic() + THREADS
        for thread in _threads() - self.threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                yield f"the thread {thread.name}"

    def _children(self) -> Iterator[str]:
        end = time.monotonic() + PROCESSES
        while (left := _children().keys() - self.processes) and time.monotonic() < end:
            time.sleep(0.02)
        names = {child.pid: child.name for child in multiprocessing.active_children()}
        words = _children()
        for process in left:
            yield f"the process {names.get(process[0]) or words.get(process)} (pid {process[0]})"


async def tasks_left(before: "set[asyncio.Task[object]]") -> list[str]:
    """Tasks of the running loop that are not done, this one aside, and were not there before."""
    await turns()
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    return [f"the task {task.get_name()} in {task.get_coro()!r}" for task in left]


async def turns() -> None:
    """What is due on the running loop happens."""
    for _ in range(3):
        await asyncio.sleep(0)


def _threads() -> frozenset[threading.Thread]:
    return frozenset(each for each in threading.enumerate() if each.name.startswith("aiorpc"))


# ── processes, as Linux tells of them ───────────────────────────────────────────────────────────


def _children() -> dict[Process, str]:
    """This process's children and theirs, with their names; multiprocessing's helpers aside."""
    parents, found = _processes(), dict[Process, str]()
    generation = {os.getpid()}
    spared = helpers()
    while generation:
        born = {pid: each for pid, each in parents.items() if each.parent in generation}
        found |= {(pid, each.start): each.name for pid, each in born.items() if pid not in spared}
        generation = set(born)
    return found


@dataclass(frozen=True)
class _Process:
    name: str
    parent: int
    start: str


def _processes() -> dict[int, _Process]:
    """Every process but the zombies."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(")")
        except OSError:  # it ended meanwhile
            continue
        state, parent, *rest = tail.split()
        if state != "Z":
            found[int(path.parent.name)] = _Process(
                head.partition("(")[2], int(parent), start=rest[17]
            )
    return found
