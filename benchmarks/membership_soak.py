"""Is a world the same after a thousand workers have joined and left it, while calls run?

Workers join a local world, are called by this process and by a child that stays, call that child
themselves, and leave while calls run there; every second one is killed instead. Each call must
return the right value, or raise a documented error if it meets the end of its worker. The exit code
is 1 if a call ended otherwise, or if this process or the child that stays holds more with each
worker that has left, in the second half of them.

    python -m benchmarks.membership_soak [--quick] [--joins N] [--at-once N]
"""

import argparse
import asyncio
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterator
from typing import Any, NamedTuple

import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import NotInWorld, WorkerGone, call, create, remote

from ._compare import lay_out
from ._process import census_at_rest, open_descriptors, swept_memory
from ._soak_end import end, parse_sizes

HERE, THERE = "main", "stays"  # where counts are taken
PATIENCE = 120.0  # seconds for one worker, from its start to its end
REST = 30.0  # seconds until which the ends of calls and processes have been noticed
LARGE = 65_536  # floats, which travel in shared memory
ENOUGH = 500  # joins from which on growth exceeds noise
KILOBYTES, OBJECTS = 30.0, 8.0  # that may be left of a worker: torch keeps its name and pipe
SPARE = 4  # descriptors and threads that may come and go
ENDS = (NotInWorld, WorkerGone)  # documented errors of calls to a worker that leaves


class Sample(NamedTuple):
    """What a process holds while no worker joins or leaves."""

    memory: int  # bytes
    objects: int
    descriptors: int
    threads: int
    tasks: int
    in_flight: int


async def sample() -> Sample:
    """Return the sample of the process that runs this."""
    found = await census_at_rest()
    stats = found.stats
    counts = found.threads, found.tasks, stats.in_flight + stats.running
    return Sample(swept_memory(), found.blocks, open_descriptors() - stats.segments, *counts)


class Guest:
    """An object on a worker that joins."""

    def __init__(self) -> None:
        self._calls = 0

    async def double(self, x: Any) -> Any:
        self._calls += 1
        return 2 * x

    def double_in_thread(self, x: Any) -> Any:
        return 2 * x

    async def count_to(self, last: int) -> AsyncIterator[int]:
        for number in range(last):
            yield number

    async def pid(self) -> int:
        return os.getpid()

    async def visit(self, host: str) -> int:
        """Call the worker that stays, from here."""
        return int(await call(host, answer, 20))


async def answer(x: int) -> int:
    return x + 1


async def visit(name: str) -> int:
    """Make an object on a worker that joined, and call it, from the worker that stays."""
    return int(await remote(await create(name, Guest)).double(8))


class Soak:
    """Workers that join, are called and leave, several at once."""

    def __init__(self, me: aiorpc.types.LocalWorker) -> None:
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self._me = me
        self._numbers = itertools.count()

    async def run(self, joins: int, at_once: int) -> None:
        last = next(self._numbers) + joins
        async with asyncio.TaskGroup() as lanes:
            for _ in range(at_once):
                lanes.create_task(self._lane(last))

    async def _lane(self, last: int) -> None:
        while (number := next(self._numbers)) <= last:
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._welcome(f"guest{number}", is_killed=number % 2 > 0)
            except Exception as exc:
                self.problems.append(f"guest{number}: {exc!r}")

    async def _welcome(self, name: str, *, is_killed: bool) -> None:
        """Let a worker join, call it in every way, and end it while calls run there."""
        await self._me.start(name)
        guest = await create(name, Guest)
        await self._expect(remote(guest).double(4), 8)
        await self._expect(remote(guest).double_in_thread(5), 10)
        tensor = remote(guest).double(torch.ones(LARGE))
        await self._expect(_sum(tensor), 2 * LARGE)
        await self._expect(_last(remote(guest).count_to(50)), 49)
        await self._expect(call(THERE, visit, name), 16)
        await self._expect(remote(guest).visit(THERE), 21)
        busy = [asyncio.create_task(self._keep_calling(guest)) for _ in range(2)]
        there = asyncio.create_task(self._expect(call(THERE, end_of_calls, name), True))
        if is_killed:
            os.kill(await remote(guest).pid(), signal.SIGKILL)
        else:
            await self._me.stop(name)
        await asyncio.gather(*busy, there)

    async def _keep_calling(self, guest: Any) -> None:
        """Call a worker until it has left."""
        for number in itertools.count():
            try:
                value = await remote(guest).double(number)
            except ENDS as exc:
                self.outcomes[type(exc).__name__] += 1
                return
            self._check(value, 2 * number)

    async def _expect(self, awaited: Awaitable[Any], value: Any) -> None:
        self._check(await awaited, value)

    def _check(self, value: Any, wanted: Any) -> None:
        self.outcomes["value"] += 1
        if value != wanted:
            self.problems.append(f"got {value!r} in place of {wanted!r}")


async def _sum(tensor: Awaitable[torch.Tensor]) -> float:
    return float((await tensor).sum())


async def _last(numbers: AsyncIterable[int]) -> int:
    return [number async for number in numbers][-1]


async def end_of_calls(name: str) -> bool:
    """Call a worker until it has left; return whether the last call raised a documented error."""
    try:
        while True:
            await call(name, answer, 1)
    except ENDS:
        return True


# ── checks ──────────────────────────────────────────────────────────────────────────────────────


async def rest(before: list[Sample] | None = None) -> list[Sample]:
    """Sample both processes once they hold no more than before, or after a while."""
    end = time.monotonic() + REST
    while True:
        found = [await call(worker, sample) for worker in (HERE, THERE)]
        is_quiet = all(each.in_flight <= 2 for each in found)  # the samples themselves
        is_at_rest = is_quiet and not (before and any(left(before, found, 0)))
        if is_at_rest or time.monotonic() > end:
            return found
        await asyncio.sleep(0.1)


def left(before: list[Sample], after: list[Sample], joins: int) -> Iterator[str]:
    """Yield what each process holds for workers that have left."""
    for worker, was, now in zip((HERE, THERE), before, after, strict=True):
        for name in ("descriptors", "threads", "tasks"):
            if (more := getattr(now, name) - getattr(was, name)) > SPARE:
                yield f"{worker}: {more} {name} are left"
        if joins >= ENOUGH:
            kilobytes, objects = (now.memory - was.memory) / 1e3, now.objects - was.objects
            if kilobytes > KILOBYTES * joins:
                yield f"{worker}: {kilobytes / joins:.1f} kB of memory are left of each worker"
            if objects > OBJECTS * joins:
                yield f"{worker}: {objects / joins:.1f} objects are left of each worker"


def show(soak: Soak, before: list[Sample], after: list[Sample], joins: int) -> None:
    said = ", ".join(f"{end} {count:,}" for end, count in sorted(soak.outcomes.items()))
    print(f"\n{2 * joins:,} workers have joined and left; calls: {said}\n")
    table: list[tuple[str, ...]] = [
        ("left of each of the second half", "kB", "objects", "descriptors", "threads", "tasks")
    ]
    for worker, was, now in zip((HERE, THERE), before, after, strict=True):
        each = [f"{(b - a) / joins:+.2f}" for a, b in zip(was, now, strict=True)]
        each[0] = f"{(now.memory - was.memory) / joins / 1e3:+.2f}"
        table.append((worker, *each[:5]))
    lay_out(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A thousand workers that join and leave.")
    parser.add_argument("--quick", action="store_true", help="20 workers")
    parser.add_argument("--joins", type=int, metavar="N", help="number of workers (1,000)")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="at once (4)")
    return parse_sizes(parser, joins=(20, 1_000))


async def main(given: argparse.Namespace) -> list[str]:
    """Run the soak; return its problems."""
    async with aiorpc.local_world([THERE]) as me:
        soak = Soak(me)
        half = given.joins // 2  # until every table has been used, and that of names is full
        await soak.run(given.joins - half, given.at_once)
        before = await rest()
        await soak.run(half, given.at_once)
        after = await rest(before)
        show(soak, before, after, half)
        return [*soak.problems, *left(before, after, half)]


if __name__ == "__main__":
    end(asyncio.run(main(arguments())), "\n")
