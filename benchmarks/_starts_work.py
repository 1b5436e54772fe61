"""The work of a program that starts workers, and its figures."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

OBJECTS, ON = 1_000, 8
"""Number of objects, and of the workers that hold them."""


class Workers(Protocol):
    """The workers of a started system."""

    async def pids(self) -> Sequence[int]:
        """Call each worker, for its process id."""

    async def create(self, count: int) -> Any:
        """Make objects, all at once, spread over the workers; return when all exist."""


Starter = Callable[[int], AbstractAsyncContextManager[Workers]]


@dataclass(frozen=True, slots=True)
class Start:
    """Figures of one program, in seconds and MB."""

    first: float
    start: float
    memory: float
    end: float
    objects: float | None


def own_memory(pid: int) -> float:
    """Return the MB of a process that it shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1e3


@asynccontextmanager
async def timed(times: list[float]) -> AsyncIterator[None]:
    begin = time.perf_counter()
    yield
    times.append(time.perf_counter() - begin)


async def measure(starter: Starter, size: int) -> Start:
    """Start the workers twice, each time until every one has answered a call."""
    starts: list[float] = []
    ends: list[float] = []
    objects: list[float] = []
    memory: list[float] = []
    for _ in range(2):
        world = starter(size)
        async with timed(starts):
            workers = await world.__aenter__()
            pids = await workers.pids()
        memory = [own_memory(each) for each in pids]
        if size == ON:
            async with timed(objects):
                kept = await workers.create(OBJECTS)
            del kept
        async with timed(ends):
            await world.__aexit__(None, None, None)
    return Start(starts[0], starts[1], median(memory), ends[1], objects[-1] if objects else None)


def age() -> float:
    """Return the seconds since this program was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def report(starter: Starter) -> None:
    """Measure, and print the figures as a line of JSON."""
    before = age()
    start = asyncio.run(measure(starter, int(sys.argv[1])))
    values = asdict(start) | {"first": start.first + before}
    os.write(1, f"\n{json.dumps(values)}\n".encode())
