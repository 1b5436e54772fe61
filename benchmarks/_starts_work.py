"""The work of a program that starts workers, and its figures."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

OBJECTS, ON = 1_000, 8
"""Number of objects, and of the workers that hold them."""

ARGUMENT = 16_000_000  # bytes that all workers take
TAKEN = 5  # times, the first of which is not counted
HOUR = 3600.0
PATIENCE = 30.0  # seconds in which the call to a killed worker has to end, and its system after it


class Workers(Protocol):
    """The workers of a started system."""

    async def pids(self) -> Sequence[int]:
        """Call each worker, for its process id."""

    async def create(self, count: int) -> Any:
        """Make objects, all at once, spread over the workers; return when all exist."""

    async def take(self, x: Tensor) -> Any:
        """Call each worker with the argument."""

    async def wait(self) -> Any:
        """Make a call to the last worker that does not end."""


Starter = Callable[[int], AbstractAsyncContextManager[Workers]]


@dataclass(frozen=True, slots=True)
class Start:
    """Figures of one program, in seconds and MB."""

    first: float
    start: float
    memory: float
    end: float
    objects: float | None = None
    taken: float | None = None
    lost: float | None = None


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
    memory: list[float] = []
    more: dict[str, float | None] = {}
    for is_second in (False, True):
        world = starter(size)
        async with timed(starts):
            workers = await world.__aenter__()
            pids = await workers.pids()
        memory = [own_memory(each) for each in pids]
        if is_second and size == ON:
            more = {"objects": await creation(workers), "taken": await transfer(workers)}
        async with timed(ends):
            await world.__aexit__(None, None, None)
    if size == ON:
        more["lost"] = await loss(starter)
    return Start(starts[0], starts[1], median(memory), ends[1], **more)


async def creation(workers: Workers) -> float:
    """Return the seconds until the objects exist."""
    times: list[float] = []
    async with timed(times):
        kept = await workers.create(OBJECTS)
    del kept
    return times[0]


async def transfer(workers: Workers) -> float:
    """Return the milliseconds until all workers have taken the argument."""
    x = torch.rand(ARGUMENT // 4)
    times: list[float] = []
    for _ in range(TAKEN):
        async with timed(times):
            await workers.take(x)
    return median(times[1:]) * 1e3


async def loss(starter: Starter) -> float | None:
    """Return the seconds until a call fails whose worker is killed; None if it goes on waiting."""
    world = starter(ON)
    workers = await world.__aenter__()
    pids = await workers.pids()
    waiting = asyncio.ensure_future(workers.wait())
    await asyncio.sleep(0.5)  # the call is there
    begin = time.perf_counter()
    os.kill(pids[-1], signal.SIGKILL)
    await asyncio.wait([waiting], timeout=PATIENCE)
    seconds = time.perf_counter() - begin
    ending = asyncio.ensure_future(world.__aexit__(None, None, None))
    if (await asyncio.wait([ending], timeout=PATIENCE))[0]:
        ending.exception()
    # A system that does not end, and may not be cancelled either, is ended with this program.
    return seconds if waiting.done() and waiting.exception() else None


def age() -> float:
    """Return the seconds since this program was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def report(starter: Starter) -> None:
    """Measure, print the figures as a line of JSON, and end this program and all that it began."""
    before = age()
    start = asyncio.Runner().run(measure(starter, int(sys.argv[1])))
    values = asdict(start) | {"first": start.first + before}
    os.write(1, f"\n{json.dumps(values)}\n".encode())
    os.killpg(0, signal.SIGKILL)
