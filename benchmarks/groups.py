"""What does a call of many objects cost, and does a work queue lose anything with a member?

One group call is compared with a loop of `rpc_async` of plain torch, with a loop of `await`, and
with `asyncio.gather`. The ways take turns in one world. CPU is that of all its processes. Then
`Group.map` runs while one of its members is killed.

    python -m benchmarks.groups [--quick] [--repeat N] [--members N ...]
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, call, create, remote, testing

from ._compare import Row, Runs, parse, settle, show
from ._process import cpu_seconds

MEMBERS, QUICK = [4, 16, 64], [2, 4]
CALLS = 2_048  # of small arguments, in one measurement of each way
LARGE_CALLS = 128  # of large ones
MB = 1_000_000
ITEMS = 10_000  # of the map
WORKERS = 4  # of the map
PATIENCE = 600.0  # seconds for a world to start


class Member:
    """Answers with its argument, or with the size of a large one."""

    async def echo(self, x: float) -> float:
        return x

    async def size(self, x: Tensor) -> int:
        return x.numel()


def echo(x: float) -> float:
    return x


def size(x: Tensor) -> int:
    return x.numel()


async def pid() -> int:
    return os.getpid()


@dataclass
class Way:
    """One way to call all members, and its measurements."""

    name: str
    run: Callable[[Any], Awaitable[None]]  # calls every member once
    rates: list[float] = field(default_factory=list)  # calls/s
    cpu: list[float] = field(default_factory=list)  # µs a call, in all processes
    sent: list[float] = field(default_factory=list)  # bytes a call


def ways_of(group: Group[Member], names: Sequence[str], *, large: bool) -> list[Way]:
    method = "size" if large else "echo"

    async def by_group(x: Any) -> None:
        await getattr(remote(group), method)(x)

    async def by_await(x: Any) -> None:
        for member in group:
            await getattr(remote(member), method)(x)

    async def by_gather(x: Any) -> None:
        await asyncio.gather(*(getattr(remote(member), method)(x) for member in group))

    async def by_torch(x: Any) -> None:
        function = size if large else echo  # blocks the loop, as its users do
        for future in [rpc.rpc_async(name, function, args=(x,), timeout=0) for name in names]:
            future.wait()

    return [
        Way("group", by_group),
        Way("rpc_async", by_torch),
        Way("loop of await", by_await),
        Way("gather", by_gather),
    ]


async def measure(way: Way, x: Any, rounds: int, members: int, pids: Sequence[int]) -> None:
    """Add a measurement: the rate and the CPU of a call."""
    settle()
    before, cpu, start = aiorpc.observe.stats().bytes_sent, cpu_seconds(pids), time.perf_counter()
    for _ in range(rounds):
        await way.run(x)
    seconds, calls = time.perf_counter() - start, rounds * members
    way.rates.append(calls / seconds)
    way.cpu.append((cpu_seconds(pids) - cpu) / calls * 1e6)
    way.sent.append((aiorpc.observe.stats().bytes_sent - before) / calls)


async def compare(ways: Sequence[Way], x: Any, rounds: int, repeat: int, pids: list[int]) -> None:
    """Measure the ways in turn; the first repetition warms up."""
    members = len(pids) - 1
    for repetition in range(repeat + 1):
        order = ways if repetition % 2 else ways[::-1]
        for way in order:
            await measure(way, x, rounds, members, pids)
    for way in ways:
        for found in (way.rates, way.cpu, way.sent):
            del found[0]


async def rows_of(members: int, repeat: int, scale: int) -> list[Row]:
    """Return the rows of a world with so many members."""
    rows = []
    async with testing.world(members, start_timeout=PATIENCE) as me:
        group = await create(me.peers, Member)
        pids = [os.getpid(), *await asyncio.gather(*(call(each, pid) for each in me.peers))]
        for x, calls in ((1.0, CALLS), (torch.ones(MB // 4), LARGE_CALLS)):
            large = isinstance(x, Tensor)
            ways = ways_of(group, me.peers, large=large)
            await compare(ways, x, max(2, calls // scale // members), repeat, pids)
            rows += table(members, ways, "1 MB" if large else "small", sent=large)
    return rows


def table(members: int, ways: Sequence[Way], what: str, *, sent: bool) -> list[Row]:
    own, torchs, *others = ways
    start = f"{members} members, {what}"
    rows = [
        Row(f"{start}: against {other.name}", "calls/s", Runs(own.rates, other.rates))
        for other in (torchs, *others)
    ]
    rows += [
        Row(f"{start}: CPU, against {other.name}", "µs a member", Runs(own.cpu, other.cpu), aim)
        for other, aim in zip((torchs, *others), ("", "≤ 1, 0.3", ""), strict=True)
    ]
    if sent:
        rows.append(Row(f"{start}: bytes sent", "bytes a member", Runs(own.sent, others[0].sent)))
    return rows


# ── a member is killed ──────────────────────────────────────────────────────────────────────────


async def map_with_a_loss(items: int) -> tuple[float, bool]:
    """Return items/s of a map with a member that is killed in the middle, and if all is there."""
    async with testing.world(WORKERS, start_timeout=PATIENCE) as me:
        group = await create(me.peers, Member)
        found: list[float] = []
        start = time.perf_counter()
        async for x in group.map(Member.echo, range(items), in_flight=8):
            found.append(x)
            if len(found) == items // 2:
                testing.kill(me.peers[1])
        return items / (time.perf_counter() - start), found == [*range(items)]


async def main(given: argparse.Namespace) -> list[Row]:
    scale = 16 if given.quick else 1
    rows = [row for each in given.members for row in await rows_of(each, given.repeat, scale)]
    items = ITEMS // scale
    maps = [await map_with_a_loss(items) for _ in range(given.repeat)]
    assert all(complete for _, complete in maps), "an item is missing, or is there twice"
    name = f"map of {items:,} items, 1 of {WORKERS} members killed: each once"
    return [*rows, Row(name, "items/s", Runs([rate for rate, _ in maps]))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Calls of groups, and a map with a loss.")
    parser.add_argument("--members", type=int, nargs="+", metavar="N", help="members of a group")
    given = parse(parser)
    given.members = given.members or (QUICK if given.quick else MEMBERS)
    return given


if __name__ == "__main__":
    show(asyncio.run(main(arguments())), ours="group", other="other way")
