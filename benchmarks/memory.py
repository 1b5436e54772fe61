"""How much memory does a call take while it waits for its answer, here and there?

Each call is a task that waits for a gate at the callee, where each is a task too. The part of
asyncio itself is measured in a third process, with as many tasks that wait for one future. A stream
with a slow consumer must be held back, so that its memory does not grow.

    python -m benchmarks.memory [--quick] [--repeat N] [--plot PATH]
"""

import argparse
import asyncio
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import aiorpc_torch as aiorpc
from aiorpc_torch import call, create, remote

from . import _slow_stream as slow_stream
from ._compare import Row, Runs, arguments, show
from ._plot import ALSO_OURS, OTHER, OURS, Curve, Panel, draw
from ._process import own_memory, swept_memory

PARTS = 10  # in which the calls are made; memory is measured after each
STEP = 250  # tasks made in one event-loop iteration, so that the loop serves others too
MB = 1_000_000


class Gate:
    """A gate at which calls wait until it opens."""

    def __init__(self) -> None:
        self.waiting = 0
        self.opened: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        if self.opened is None:
            self.opened = asyncio.get_running_loop().create_future()
        self.waiting += 1
        await self.opened
        self.waiting -= 1

    async def open(self) -> None:
        assert self.opened is not None
        asyncio.get_running_loop().call_soon(self.opened.set_result, None)

    async def how_many(self) -> int:
        return self.waiting


class Weight(NamedTuple):
    """Memory of a process: bytes, and objects of Python's allocator."""

    memory: int
    blocks: int


async def weight() -> Weight:
    return Weight(own_memory(), sys.getallocatedblocks())


async def weight_at_rest() -> Weight:
    return Weight(swept_memory(), sys.getallocatedblocks())


@dataclass(slots=True)
class Course:
    """Memory of a process in one round: bytes above the start by part, and the rest at the end."""

    start: Weight
    parts: list[int] = field(default_factory=list)
    kept: int = 0  # bytes
    left: int = 0  # objects

    def sample(self, now: Weight) -> None:
        self.parts.append(now.memory - self.start.memory)

    def end(self, before: Weight, after: Weight) -> None:
        self.kept = after.memory - self.start.memory
        self.left = after.blocks - before.blocks


# ── calls that wait ─────────────────────────────────────────────────────────────────────────────


async def waiting_calls(calls: int, here: Course, there: Course) -> None:
    """Run a round: make the calls, open the gate, check that each is answered."""
    before = await weight_at_rest(), await call("server", weight_at_rest)
    await pass_gate(calls, here, there)
    after = await weight_at_rest(), await call("server", weight_at_rest)
    here.end(before[0], after[0])
    there.end(before[1], after[1])


async def pass_gate(calls: int, here: Course, there: Course) -> None:
    gate = await create("server", Gate)
    tasks: list[asyncio.Task[None]] = []
    for _ in range(PARTS):
        tasks += [asyncio.create_task(remote(gate).wait()) for _ in range(calls // PARTS)]
        await asyncio.sleep(0)  # they are sent in order, and begin before the next call
        expect(await remote(gate).how_many(), len(tasks))
        here.sample(await weight())
        there.sample(await call("server", weight))
    await remote(gate).open()
    await asyncio.gather(*tasks)
    expect(await remote(gate).how_many(), 0)


def expect(waiting: int, expected: int) -> None:
    if waiting != expected:
        raise AssertionError(f"{waiting} calls wait at the gate in place of {expected}")


async def waiting_tasks(calls: int, start: Weight) -> Course:
    """Measure as many tasks in one process without calls: the part of asyncio itself."""
    course, gate = Course(start), Gate()
    tasks: list[asyncio.Task[None]] = []
    for part in range(1, PARTS + 1):
        while len(tasks) < calls // PARTS * part:
            tasks.append(asyncio.create_task(gate.wait()))
            if len(tasks) % STEP == 0:
                await asyncio.sleep(0)
        course.sample(await weight())
    await gate.open()
    await asyncio.gather(*tasks)
    return course


@dataclass(slots=True)
class Courses:
    """Measurements of each process, round by round."""

    here: list[Course] = field(default_factory=list)
    there: list[Course] = field(default_factory=list)
    alone: list[Course] = field(default_factory=list)


async def measure_calls(calls: int, repeat: int) -> Courses:
    # In the first round the allocators fetch memory that they keep afterwards.
    await waiting_calls(PARTS, Course(await weight()), Course(await call("server", weight)))
    starts = [
        await weight_at_rest(),
        *[await call(worker, weight_at_rest) for worker in ("server", "alone")],
    ]
    found = Courses()
    for _ in range(repeat):
        here, there = Course(starts[0]), Course(starts[1])
        await waiting_calls(calls, here, there)
        found.here.append(here)
        found.there.append(there)
        found.alone.append(await call("alone", waiting_tasks, calls, starts[2]))
    return found


def call_rows(found: Courses, calls: int) -> list[Row]:
    def each(courses: list[Course]) -> list[float]:
        return [course.parts[-1] / calls for course in courses]

    own = each(found.alone)
    sides = {"caller": found.here, "callee": found.there}
    return [
        *[
            Row(f"{side}: a waiting call", "bytes", Runs(each(courses), own), "≤ 2,000 bytes")
            for side, courses in sides.items()
        ],
        *[
            Row(f"{side}: memory kept in stock after", "MB", Runs([c.kept / MB for c in courses]))
            for side, courses in sides.items()
        ],
        *[
            Row(f"{side}: objects left after", "", Runs([c.left for c in courses]), "0, nearly")
            for side, courses in sides.items()
        ],
    ]


def calls_panel(found: Courses, calls: int) -> Panel:
    """Return the panel of the first round; later ones reuse memory kept by the allocators."""
    xs = [calls // PARTS * part for part in range(PARTS + 1)]

    def curve(label: str, look: tuple[str, str], course: Course) -> Curve:
        return Curve(label, look, xs, [[value / MB] for value in (0, *course.parts)])

    curves = [
        curve("callee", ALSO_OURS, found.there[0]),
        curve("caller", OURS, found.here[0]),
        curve("tasks alone, no calls", OTHER, found.alone[0]),
    ]
    return Panel("Calls that wait", "calls", "memory above the start, MB", curves, log="")


async def main(given: argparse.Namespace) -> tuple[list[Row], list[Panel]]:
    calls = 5_000 if given.quick else 100_000
    async with aiorpc.local_world(["server", "alone"]):
        found = await measure_calls(calls, given.repeat)
        items = 100 if given.quick else 1_000
        slow = [await slow_stream.consume(items) for _ in range(given.repeat)]
    print(f"{calls:,} calls wait at once; none is lost\n")
    rows = [*call_rows(found, calls), *slow_stream.rows(slow)]
    return rows, [calls_panel(found, calls), slow_stream.panel(slow)]


if __name__ == "__main__":
    given = arguments("The memory of a waiting call.")
    rows, drawn = asyncio.run(main(given))
    show(rows, other="asyncio's own")
    draw(drawn, given.plot)
