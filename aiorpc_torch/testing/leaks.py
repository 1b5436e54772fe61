"""Leak checks: tasks, pending calls, threads of this library, processes and worlds.

They compare a snapshot with the state at the end. Objects behind RRefs are not checked: torch tells
owners of dropped RRefs only in a process's first world (2.13, 2.15), in which few tests run.
"""

import asyncio
import contextlib
import glob
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Set
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from .._aio.threads import join_all
from .._children.forkserver import server_pid
from .._endpoint import entry_points
from .._inspection.calls_in_flight import pending
from .._inspection.counters import stats
from .._server.server import Server
from .._world.directory_client import WORLD_TASK

Process = tuple[int, str]  # pid and start time, since pids are reused

# Seconds in which threads and processes that are ending may end.
THREADS = 5.0
PROCESSES = 2.0


@contextlib.asynccontextmanager
async def no_leaks() -> AsyncIterator[None]:
    """Fail if something that began in this block is still there at its end.

    It checks tasks of the running loop, pending calls, threads of this library, and a world that
    was not left. It also checks child processes and theirs. Tasks may take a few loop iterations to
    end, threads a second, processes two.

    Raises:
        AssertionError: with each leak. An exception of the block takes precedence.
    """
    tasks, before = asyncio.all_tasks(), Snapshot.take()
    yield
    assert_no_leaks([*await leftover_tasks(tasks), *before.leftovers()])


def assert_no_leaks(leaks: Iterable[str]) -> None:
    """Raise AssertionError with each leak, if there are any."""
    if found := list(leaks):
        raise AssertionError("left behind: " + "; ".join(found))


@dataclass(frozen=True)
class Snapshot:
    """The state of this process that leaks would change, without its tasks."""

    world: Server | None
    calls: int
    threads: frozenset[threading.Thread]
    processes: frozenset[Process]

    @classmethod
    def take(cls) -> "Snapshot":
        """Return a snapshot of now."""
        return cls(entry_points.serving(), stats().in_flight, _threads(), frozenset(_children()))

    def leftovers(self) -> Iterator[str]:
        """Describe everything that is new since the snapshot."""
        yield from self.leftover_calls()
        world = entry_points.serving()
        if world not in (None, self.world):
            yield "a world that was not left"
        if world is None:  # else the threads belong to it
            new = _threads() - self.threads
            join_all(new, THREADS)
            yield from (f"the thread {thread.name}" for thread in new if thread.is_alive())
        end = time.monotonic() + PROCESSES
        while (left := _children(but=self.processes)) and time.monotonic() < end:
            time.sleep(0.02)
        if left:
            names = {child.pid: child.name for child in multiprocessing.active_children()}
            for (pid, _), name in left.items():
                yield f"the process {names.get(pid) or name} (pid {pid})"

    def leftover_calls(self) -> Iterator[str]:
        """Describe calls that are pending since the snapshot."""
        count = stats().in_flight - self.calls
        if count > 0:
            newest = [each for each in pending() if not each.incoming][-count:]
            listed = ", ".join(f"{each.method} of {each.worker!r}" for each in newest)
            yield f"{count} pending call{'s' * (count > 1)} ({listed})"


async def leftover_tasks(before: "set[asyncio.Task[object]]") -> list[str]:
    """Describe tasks of the running loop that are not in `before`, without the current one."""
    await run_due_callbacks()
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    told = [task for task in left if task.get_name() != WORLD_TASK]  # `leftovers` tells of a world
    return [f"the task {task.get_name()} in {task.get_coro()!r}" for task in told]


async def run_due_callbacks() -> None:
    """Let the running loop call what is due."""
    for _ in range(3):
        await asyncio.sleep(0)


def _threads() -> frozenset[threading.Thread]:
    return frozenset(each for each in threading.enumerate() if each.name.startswith("aiorpc"))


def _children(but: Set[Process] = frozenset()) -> dict[Process, str]:
    """Return by /proc this process's children and theirs with names, without helpers of Python."""
    # The helpers live as long as this process. Their names are private to CPython.
    tracker: Any = resource_tracker._resource_tracker
    theirs: Any = forkserver._forkserver
    helpers = {server_pid(), tracker._pid, theirs._forkserver_pid}
    found, todo = dict[Process, str](), [os.getpid()]
    while todo:
        pids: list[int] = []
        for path in glob.glob(f"/proc/{todo.pop()}/task/*/children"):
            with contextlib.suppress(OSError):  # the thread has ended
                pids += map(int, Path(path).read_text().split())
        todo += pids
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
                state, *rest = tail.split()
                if state != "Z" and pid not in helpers:
                    found[pid, rest[18]] = head.partition("(")[2]
    return {each: name for each, name in found.items() if each not in but}
