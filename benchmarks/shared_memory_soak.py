"""Are memory and descriptors flat after a million tensors in shared memory, with kills between?

This process and three children call each other with tensors of random sizes. Two of the children
are killed in turn and started again, each in the middle of a round of calls. The exit code is 1 if
a call ended wrongly or did not end, or if something is left.

    python -m benchmarks.shared_memory_soak [--quick] [--messages N] [--kills N] [--seed N]
"""

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, RRef, WorkerLost, call, create, remote, testing
from aiorpc_torch._wire.tensors import INLINE_BYTES

from ._compare import lay_out
from ._process import mapped_segments, open_descriptors, swept_memory, use_one_arena
from ._shared_memory_shelf import Client, Shelf
from ._soak_end import end, parse_sizes

SURVIVORS, VICTIMS = ["main", "a"], ["b", "c"]
WORKERS = [*SURVIVORS, *VICTIMS]
CLIENTS = 24
WARM_UP = 1_000  # messages
PATIENCE = 120.0  # seconds that a round may take at least
SLOWEST = 50  # messages a second
REST = 30.0  # seconds until which segments have to be closed
GROWTH = 4_000_000  # bytes that the second half may add to a process
ENOUGH = 20  # rounds from which on growth exceeds noise
MB = 1_000_000


class Sample(NamedTuple):
    """What a process holds while no call runs."""

    memory: int  # bytes of its own, without shared pages
    descriptors: int  # without those of segments
    mapped: int  # mappings of segments, its own and its peers'
    segments: int  # made by it
    segment_bytes: int
    pending: int  # calls and streams from there and to there


async def sample() -> Sample:
    """Return the sample of the process that runs this."""
    memory, stats = swept_memory(), aiorpc.observe.stats()
    descriptors = open_descriptors() - stats.segments
    made, pending = (stats.segments, stats.segment_bytes), stats.in_flight + stats.running
    return Sample(memory, descriptors, mapped_segments(), *made, pending)


async def samples() -> list[Sample]:
    return [await call(worker, sample) for worker in WORKERS]


class Stuck(Exception):
    """A round did not end."""


class Soak:
    """Rounds of calls with a kill in the middle."""

    def __init__(self, me: aiorpc.types.Worker, seed: int) -> None:
        self.messages = self.bytes = self.large = 0
        self.losses = 0  # calls that a kill ended
        self.problems: list[str] = []
        self._me = me
        self._shelves = Group[Shelf]([])
        self._clients = [Client(f"{seed}/{number}") for number in range(CLIENTS)]
        self._killed: str | None = None  # in this round
        self._kill_at = 0  # messages
        self._due = asyncio.Event()

    async def round(self, messages: int, victim: str | None = None) -> None:
        """Have the clients send messages, and kill a worker in the middle."""
        self._killed, self._kill_at = victim, self.messages + messages // 2
        self._due.clear()
        until = self.messages + messages
        tasks = [asyncio.create_task(self._run(client, until)) for client in self._clients]
        if victim:
            tasks.append(asyncio.create_task(self._replace(victim)))
        _, unended = await asyncio.wait(tasks, timeout=PATIENCE + messages / SLOWEST)
        if unended:
            raise Stuck(f"{len(unended)} tasks do not end; pending: {aiorpc.observe.pending()[:5]}")
        for task in tasks:
            task.result()

    async def _run(self, client: Client, until: int) -> None:
        while self.messages < until:
            try:
                self._count(await client.call(self._shelves))
            except WorkerLost as exc:
                self.losses += 1
                if exc.worker != self._killed:
                    self.problems.append(repr(exc))
            except Exception as exc:
                self.problems.append(repr(exc))
                self.messages += 1  # so that the round ends

    def _count(self, elements: Sequence[int]) -> None:
        self.messages += len(elements)
        self.bytes += 4 * sum(elements)
        self.large += sum(4 * each > INLINE_BYTES for each in elements)
        if self.messages >= self._kill_at:
            self._due.set()

    async def _replace(self, victim: str) -> None:
        """Kill a worker; go on without it until another process has taken its place."""
        await self._due.wait()
        index, shelves = WORKERS.index(victim), [*self._shelves]
        testing.kill(victim)
        self._shelves = Group(shelves[:index] + shelves[index + 1 :])
        shelves[index] = await self._recreated(victim)
        await self._meet(Group(shelves))

    async def _recreated(self, worker: str) -> RRef[Shelf]:
        while True:
            try:
                return await create(worker, Shelf)
            except WorkerLost:
                await self._me.wait_for(worker)

    async def _meet(self, shelves: Group[Shelf]) -> None:
        await remote(shelves).meet(shelves, WORKERS)
        self._shelves = shelves

    async def start(self) -> None:
        """Put a shelf on every worker; warm up, so that all have connected and rejoined once."""
        await self._meet(await create(WORKERS, Shelf))
        for victim in VICTIMS:
            await self.round(WARM_UP, victim)

    async def end(self) -> None:
        """Have the shelves forget each other: in a cycle none would be freed."""
        await remote(self._shelves).meet(Group[Shelf]([]), ())

    async def rest(self) -> list[Sample]:
        """Drop every tensor; sample every process once all segments are closed, or much later."""
        for client in self._clients:
            client.drop()
        await remote(self._shelves).drop()
        end = time.monotonic() + REST
        found = await samples()
        while any(each.segments for each in found) and time.monotonic() < end:
            await asyncio.sleep(0.5)
            found = await samples()
        return found


# ── checks ──────────────────────────────────────────────────────────────────────────────────────


def left(before: Sequence[Sample], after: Sequence[Sample]) -> Iterator[str]:
    """Yield what each process holds at the end beyond what it held at the start."""
    for worker, was, now in zip(WORKERS, before, after, strict=True):
        names = ["segments", "segment_bytes", "pending"]
        if worker in SURVIVORS:  # another process may be another size
            names += ["descriptors", "mapped"]
        for name in names:
            if (more := getattr(now, name) - getattr(was, name)) > 0:
                yield f"{worker}: {more} {name} are left"


def growths(rounds: Sequence[Sequence[Sample]]) -> list[int]:
    """Return the bytes that each survivor has grown by from one half of the rounds to the other."""
    middle = len(rounds) // 2
    halves = rounds[:middle], rounds[middle:]
    sizes = [
        [median(each[number].memory for each in half) for half in halves]
        for number in range(len(SURVIVORS))
    ]
    return [round(second - first) for first, second in sizes]


def grown(rounds: Sequence[Sequence[Sample]]) -> Iterator[str]:
    if len(rounds) < ENOUGH:
        return
    for worker, size in zip(SURVIVORS, growths(rounds), strict=True):
        if size > GROWTH:
            yield f"{worker}: the second half added {size / MB:.1f} MB"


def unshared(shared: int, large: int) -> Iterator[str]:
    if shared < large / 4:  # this process sends about half of the large tensors
        yield f"only {shared:,} calls were in shared memory, of {large:,} large tensors"


# ── output ──────────────────────────────────────────────────────────────────────────────────────


def show_head() -> None:
    heads = "  ".join(f"{worker}: MB descriptors mapped" for worker in SURVIVORS)
    print(f"{'messages':>9}  {'s':>5}  {'lost':>5}  {heads}", flush=True)


def show_round(soak: Soak, seconds: float, found: Sequence[Sample]) -> None:
    cells = [f"{x.memory / MB:8.1f} {x.descriptors:11} {x.mapped:6}" for x in found]
    line = "  ".join(cells[: len(SURVIVORS)])
    print(f"{soak.messages:9,}  {seconds:5.0f}  {soak.losses:5,}  {line}", flush=True)


def show_rest(before: Sequence[Sample], after: Sequence[Sample]) -> None:
    table = [("at rest", "memory, MB", "descriptors", "mapped segments", "own segments")]
    for worker, was, now in zip(WORKERS, before, after, strict=True):
        pairs = zip(was[1:4], now[1:4], strict=True)
        counts = [f"{one} → {other}" for one, other in pairs]
        memory = f"{was.memory / MB:.1f} → {now.memory / MB:.1f}"
        table.append((worker, memory, counts[0], counts[1], counts[2]))
    print()
    lay_out(table)


async def main(given: argparse.Namespace) -> list[str]:
    """Run the soak; return its problems."""
    use_one_arena()
    world = testing.world if given.quick else aiorpc.local_world  # children start sooner
    async with world(WORKERS[1:], max_restarts=given.kills + len(VICTIMS)) as me:
        soak = Soak(me, given.seed)
        try:
            return await run(soak, given.messages, given.kills)
        except Exception as exc:
            return [f"stopped by {exc!r}", *soak.problems]


async def run(soak: Soak, messages: int, kills: int) -> list[str]:
    await soak.start()
    before, rounds, start = await soak.rest(), list[list[Sample]](), time.monotonic()
    show_head()
    for number in range(max(1, kills)):
        victim = VICTIMS[number % len(VICTIMS)] if kills else None
        await soak.round(messages // max(1, kills), victim)
        rounds.append(await samples())
        show_round(soak, time.monotonic() - start, rounds[-1])
    seconds, after = time.monotonic() - start, await soak.rest()
    await soak.end()
    shared = aiorpc.observe.stats().shared_messages
    show_rest(before, after)
    print(
        f"\n{soak.messages:,} messages, {soak.bytes / 1e9:.1f} GB, {soak.large:,} of them large; "
        f"{shared:,} calls of this process in shared memory; {kills} kills, which ended "
        f"{soak.losses:,} calls; {seconds:.0f} s"
    )
    if len(rounds) >= ENOUGH:
        more = ", ".join(f"{each / MB:+.1f}" for each in growths(rounds))
        print(f"memory of {' and '.join(SURVIVORS)} from the first half to the second: {more} MB")
    return [
        *soak.problems,
        *left(before, after),
        *grown(rounds),
        *unshared(shared, soak.large),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A million tensors in shared memory, with kills.")
    parser.add_argument("--quick", action="store_true", help="5,000 messages and 2 kills")
    parser.add_argument("--messages", type=int, metavar="N", help="messages (1,000,000)")
    parser.add_argument("--kills", type=int, metavar="N", help="killed workers (50)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the clients (0)")
    return parse_sizes(parser, messages=(5_000, 1_000_000), kills=(2, 50))


if __name__ == "__main__":
    end(asyncio.run(main(arguments())))
