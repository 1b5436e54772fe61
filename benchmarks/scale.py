"""How many workers does one machine take, and what do they cost while they are idle?

Worlds of growing size run with our default transport of torch's RPC (uv alone) and with torch's
default (shared memory first). Measured are the time to start and to stop, the load of idle
processes, and the cost of a call. A round of small calls to every worker shows the cost of idle
workers for busy ones.

    python -m benchmarks.scale [--quick] [--repeat N] [--sizes N ...] [--start spawn] [--plot PATH]
"""

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import aiorpc_torch as aiorpc
from aiorpc_torch import call

from ._compare import number, parse, processor
from ._plot import OURS, RAW, Curve, Panel, draw
from ._process import cpu_seconds

WAYS = {"shm": ["shm", "uv"], "uv": ["uv"]}  # torch's default, and ours
SIZES, QUICK = [2, 8, 32, 64], [2, 8]
IDLE = 4.0  # seconds of idleness
SETTLE = 1.0  # seconds until the work of the start is done
LONE = 50  # calls, one after another
EACH = 2_000  # calls at once, spread over all workers
PATIENCE = 600.0  # seconds for a world to start
MB = 1_000


@dataclass(frozen=True, slots=True)
class World:
    """Measurements of one world. HEADS has the unit of each field."""

    start: float
    stop: float
    cpu: float
    memory: float
    memory_each: float
    threads: float
    files: float
    lone: float
    rate: float


HEADS = {
    "start": "start, s",
    "stop": "stop, s",
    "cpu": "idle CPU, % of a core",
    "memory": "memory, MB",
    "memory_each": "a worker, MB",
    "threads": "threads a worker",
    "files": "files a worker",
    "lone": "lone call, µs",
    "rate": "calls/s",
}


# ── one world ───────────────────────────────────────────────────────────────────────────────────


async def measure(size: int, transports: list[str], *, quick: bool, start: Any) -> World:
    """Start a world of `size` workers, this process included; measure and end it."""
    begin = time.perf_counter()
    options = {"transports": transports, "start_timeout": PATIENCE, "start": start}
    async with aiorpc.local_world(size - 1, **options) as me:
        started = time.perf_counter()
        lone, rate = await lone_call(me), await calls_at_once(me)
        # They have talked to this process, which so has a connection to each.
        pids = [os.getpid(), *await asyncio.gather(*(call(each, pid) for each in me.peers))]
        cpu = await idle_cpu(pids, 1.0 if quick else IDLE)
        memory = [proportional_memory(each) for each in pids]
        threads = [count(each, "task") for each in pids]
        files = [count(each, "fd") for each in pids]
        ready = time.perf_counter()
    return World(
        start=started - begin,
        stop=time.perf_counter() - ready,
        cpu=cpu,
        memory=sum(memory) / MB,
        memory_each=median(memory[1:]) / MB,
        threads=median(threads[1:]),
        files=median(files[1:]),
        lone=lone,
        rate=rate,
    )


async def pid() -> int:
    return os.getpid()


async def nothing() -> None:
    """Do nothing; a call of this shows the cost of a call."""


async def lone_call(me: aiorpc.types.Worker) -> float:
    """Return the µs of a call to one worker; the first call opens the connection."""
    times = []
    for _ in range(LONE + 1):
        begin = time.perf_counter()
        await call(me.peers[0], nothing)
        times.append(time.perf_counter() - begin)
    return median(times[1:]) * 1e6


async def calls_at_once(me: aiorpc.types.Worker) -> float:
    """Return calls per second, spread over all workers, once each has a connection."""
    await asyncio.gather(*(call(each, nothing) for each in me.peers))
    begin = time.perf_counter()
    await asyncio.gather(*(call(me.peers[n % len(me.peers)], nothing) for n in range(EACH)))
    return EACH / (time.perf_counter() - begin)


async def idle_cpu(pids: Sequence[int], seconds: float) -> float:
    """Return the idle CPU of all these processes together, in percent of a core."""
    await asyncio.sleep(SETTLE)
    before, begin = cpu_seconds(pids), time.perf_counter()
    await asyncio.sleep(seconds)
    return (cpu_seconds(pids) - before) / (time.perf_counter() - begin) * 100.0


def proportional_memory(process: int) -> int:
    """Return KB of a process; shared pages are divided among their processes."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def count(process: int, what: str) -> int:
    return len(os.listdir(f"/proc/{process}/{what}"))


# ── all of them ─────────────────────────────────────────────────────────────────────────────────

Found = dict[tuple[int, str], list[World]]


@asynccontextmanager
async def alone() -> AsyncIterator[None]:
    """Wait first, so that remaining work of the last world does not count for the next."""
    await asyncio.sleep(SETTLE)
    yield


async def main(given: argparse.Namespace) -> Found:
    found: Found = {(size, way): [] for size in given.sizes for way in WAYS}
    for size, way in found:
        for _ in range(given.repeat):
            async with alone():
                world = await measure(size, WAYS[way], quick=given.quick, start=given.start)
            found[size, way].append(world)
    return found


def middle(worlds: Sequence[World], what: str) -> float:
    found: float = median(getattr(world, what) for world in worlds)
    return found


def show(found: Found, repeat: int) -> None:
    table = Table("workers", "transport", *HEADS.values())
    for (size, way), worlds in found.items():
        cells = [number(middle(worlds, each.name)) for each in fields(World)]
        table.add_row(str(size), way, *cells, end_section=way == [*WAYS][-1])
    Console(width=150, highlight=False).print(table)
    print(f"medians of {repeat}; {processor()}, {os.cpu_count()} cores")


def panels(found: Found, sizes: Sequence[int]) -> list[Panel]:
    looks = dict(zip(WAYS, (RAW, OURS), strict=True))

    def panel(title: str, what: str) -> Panel:
        curves = [
            Curve(way, look, sizes, [[getattr(w, what) for w in found[n, way]] for n in sizes])
            for way, look in looks.items()
        ]
        return Panel(title, "workers", HEADS[what], curves)

    return [
        panel("Start", "start"),
        panel("Idle world", "cpu"),
        panel("Calls to all of them", "rate"),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of workers on one machine.")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a figure: .svg or .png")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="workers in a world")
    parser.add_argument("--start", choices=("forkserver", "spawn"), default="forkserver")
    given = parse(parser)
    given.sizes = given.sizes or (QUICK if given.quick else SIZES)
    return given


if __name__ == "__main__":
    given = arguments()
    found = asyncio.run(main(given))
    show(found, given.repeat)
    if given.plot:
        draw(panels(found, given.sizes), given.plot)
