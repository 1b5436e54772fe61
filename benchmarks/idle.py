"""What does an idle world cost, and how long does it take to stop?

Each worker has been called once, so that every connection exists. The CPU time is that of this
process and its children (multiprocessing's resource tracker is one), in all threads. The default
transport of torch's RPC is compared with torch's own choice, shared memory, whose threads poll for
messages all the time.

    python -m benchmarks.idle [--sizes N ...] [--seconds S]
"""

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiorpc_torch as aiorpc
from aiorpc_torch import call

from ._compare import lay_out, machine, number
from ._process import cpu_seconds, family, wakeups

SIZES = [3, 32]
SETTLE = 1.0  # seconds until the work of the start is done
PATIENCE = 600.0  # seconds for a world to start
SHARED = ["shm", "uv"]


@dataclass(frozen=True, slots=True)
class Idle:
    """Measurements of one world."""

    start: float  # seconds
    processes: int
    cpu: float  # percent of a core
    wakeups: float  # a second
    leave: float  # seconds


async def nothing() -> None:
    """Do nothing; a call of this opens the connection."""


async def measure(size: int, transports: Sequence[str] | None, seconds: float) -> Idle:
    """Measure an idle world of `size` children and this process for `seconds`."""
    begin = time.perf_counter()
    async with aiorpc.local_world(size, transports=transports, start_timeout=PATIENCE) as me:
        start = time.perf_counter() - begin
        await asyncio.gather(*(call(peer, nothing) for peer in me.peers))
        pids = family(os.getpid())
        await asyncio.sleep(SETTLE)
        used, woken, begin = cpu_seconds(pids), wakeups(pids), time.perf_counter()
        await asyncio.sleep(seconds)
        used, woken = cpu_seconds(pids) - used, wakeups(pids) - woken
        end = time.perf_counter()
    leave = time.perf_counter() - end
    passed = end - begin
    return Idle(start, len(pids), used / passed * 100.0, woken / passed, leave)


def row(size: int, transports: Sequence[str] | None, found: Idle) -> tuple[str, ...]:
    values = (found.cpu, found.cpu / found.processes, found.wakeups, found.start, found.leave)
    way = "default" if transports is None else ", ".join(transports)
    return str(size), way, str(found.processes), *map(number, values)


async def main(given: argparse.Namespace) -> None:
    heads = (
        "children",
        "transports",
        "processes",
        "CPU, % of a core",
        "each",
        "wake-ups/s",
        "start, s",
        "leave, s",
    )
    table: list[tuple[str, ...]] = [heads]
    # Shared memory only in the smallest world: its polling threads would take all cores.
    worlds = [(size, None) for size in given.sizes] + [(min(given.sizes), SHARED)]
    for size, transports in worlds:
        table.append(row(size, transports, await measure(size, transports, given.seconds)))
        await asyncio.sleep(SETTLE)  # finish the work of this world before the next one
    lay_out(table)
    print(f"\nidle for {given.seconds:g} s, after {SETTLE:g}; {machine()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The cost of an idle world.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="children")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="idle seconds")
    asyncio.run(main(parser.parse_args()))
