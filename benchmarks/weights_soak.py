"""Are memory and descriptors flat after ten thousand versions of weights, with kills between?

A learner publishes to followers on its own host, and to followers that behave as another host and
so receive by way of a relay. In each round one process is killed and replaced in the middle: the
learner, a follower, or the relay. At its end every follower has the last version. The exit code is
1 if a version was not whole, if numbers did not grow, if a round did not end, or if processes that
stay hold more.

    python -m benchmarks.weights_soak [--quick] [--versions N] [--rounds N]
"""

import argparse
import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple, Self, TypeVar

import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, WorkerLost, call, register, remote, supervised, testing, training
from aiorpc_torch.training import Weights
from aiorpc_torch.types import Supervised

from ._compare import lay_out
from ._process import mapped_segments, open_descriptors, swept_memory
from ._soak_end import end, parse_sizes

T = TypeVar("T")

NEAR, FAR = ["stays", "near"], ["far0", "far1", "far2"]
SURVIVORS = ["main", "stays"]
KINDS = ("learner", "follower", "relay")
TENSORS, ELEMENTS = 8, 16_384  # of a version: 512 KiB
BURST = 10  # versions that the learner publishes at once
PATIENCE = 120.0  # seconds for a round
REST = 30.0  # seconds until which the ends of calls and processes have been noticed
GROWTH = 4_000_000  # bytes that the second half may add to a process
ENOUGH = 20  # rounds from which on growth exceeds noise
SPARE = {"descriptors": 4, "tasks": 4, "pending": 4, "mapped": 16}  # that may come and go
MB = 1_000_000


class Learner:
    """Publishes versions whose tensors all hold one number. Its process is replaced."""

    def __init__(self) -> None:
        self.state = {f"layer{number}": torch.zeros(ELEMENTS) for number in range(TENSORS)}
        self.weights = Weights(self.state)
        register("policy", self.weights)

    async def publish(self, first: int, count: int) -> None:
        """Publish versions that hold `first` and the numbers after it."""
        for value in range(first, first + count):
            for each in self.state.values():
                each.fill_(value)
            await self.weights.publish(self.state)


class Follower:
    """Checks each version that it sees."""

    policy: training.Follower

    def __init__(self) -> None:
        self.state = {f"layer{number}": torch.full((ELEMENTS,), -1.0) for number in range(TENSORS)}
        self.seen = 0
        self.problems: list[str] = []

    @classmethod
    async def start(cls, host: str = "") -> Self:
        """Return a follower, which behaves as a process of that host."""
        self = cls()
        self.policy = training.Follower("policy", "learner", self.state, host=host or None)
        await self.policy._begin()
        return self

    async def reach(self, value: int) -> int:
        """Wait for the version that holds this number; return how many versions were seen."""
        while self._check() != value:
            version = self.policy.version
            if await self.policy.wait(version + 1) <= version:
                self.problems.append(f"{self.policy.version} came after {version}")
            self.seen += 1
        return self.seen

    def _check(self) -> int:
        values = {float(value) for each in self.state.values() for value in each[::1_000]}
        if len(values) != 1:
            self.problems.append(f"version {self.policy.version} is not whole: {sorted(values)}")
        return int(max(values))

    async def found(self) -> list[str]:
        """Return what was wrong."""
        return self.problems

    async def relay(self) -> str | None:
        """Return the worker from which versions come, None for the learner's."""
        return self.policy._receiver._sources[0].relay


class Sample(NamedTuple):
    """What a process holds while nothing is published."""

    memory: int  # bytes of its own
    descriptors: int  # without those of segments
    mapped: int  # mappings of segments
    tasks: int
    pending: int  # calls from there and to there


async def sample() -> Sample:
    """Return the sample of the process that runs this."""
    stats = aiorpc.observe.stats()
    descriptors = open_descriptors() - stats.segments
    counts = len(asyncio.all_tasks()), stats.in_flight + stats.running
    return Sample(swept_memory(), descriptors, mapped_segments(), *counts)


async def samples() -> list[Sample]:
    return [await call(worker, sample) for worker in SURVIVORS]


class Soak:
    """Rounds of versions with a kill in the middle."""

    def __init__(self, learner: Supervised[Learner], followers: Group[Follower]) -> None:
        self.problems: list[str] = []
        self.published = self.losses = self.seen = 0
        self._learner, self._followers = learner, followers
        self._own: Follower  # of this process

    async def start(self) -> None:
        self._own = await Follower.start()

    async def round(self, versions: int, kind: str) -> None:
        """Publish versions, and kill a process of that kind in the middle; all get the last one."""
        bursts = max(
            3, -(-versions // BURST)
        )  # one at least follows the kill: the learner may be gone
        last = self.published + BURST * bursts
        calls = [partial(remote(one).reach, last) for one in self._followers]
        self.seen, *_ = await asyncio.gather(
            self._own.reach(last), self._publish_all(bursts, kind), *map(self._again, calls)
        )

    async def _publish_all(self, bursts: int, kind: str) -> None:
        for number in range(bursts):
            killing = [self._kill(kind)] if number == bursts // 2 else []
            await asyncio.gather(self._publish(), *killing)

    async def _publish(self) -> None:
        first = self.published + 1
        await self._again(partial(remote(self._learner).publish, first, BURST))
        self.published += BURST

    async def _kill(self, kind: str) -> None:
        victim = {"learner": "learner", "follower": NEAR[-1]}.get(kind)
        while victim is None:  # the relay
            victim = await self._again(remote(self._followers[-1]).relay)
        await asyncio.to_thread(testing.kill, victim)

    async def _again(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Call until no process is lost meanwhile: others take the places of those that are."""
        while True:
            try:
                return await attempt()
            except WorkerLost:
                self.losses += 1

    async def found(self) -> list[str]:
        """Return what was wrong in this process and in the followers."""
        theirs = await remote(self._followers).found()
        return [*self.problems, *self._own.problems, *itertools.chain(*theirs)]

    async def rest(self) -> list[Sample]:
        """Sample the processes that stay, once nothing changes any more."""
        end, found = time.monotonic() + REST, await samples()
        while time.monotonic() < end:
            await asyncio.sleep(0.5)
            before, found = found, await samples()
            if [each[1:] for each in before] == [each[1:] for each in found]:
                break
        return found


# ── checks ──────────────────────────────────────────────────────────────────────────────────────


def left(before: Sequence[Sample], after: Sequence[Sample]) -> Iterator[str]:
    """Yield what each process holds at the end beyond what it held at the start."""
    for worker, was, now in zip(SURVIVORS, before, after, strict=True):
        for name, spare in SPARE.items():
            if (more := getattr(now, name) - getattr(was, name)) > spare:
                yield f"{worker}: {more} {name} are left"


def growths(rounds: Sequence[Sequence[Sample]]) -> list[int]:
    """Return the bytes that each process has grown by from one half of the rounds to the other."""
    middle = len(rounds) // 2
    found = []
    for number in range(len(SURVIVORS)):
        sizes = [each[number].memory for each in rounds]
        found.append(round(median(sizes[middle:]) - median(sizes[:middle])))
    return found


def grown(rounds: Sequence[Sequence[Sample]]) -> Iterator[str]:
    if len(rounds) < ENOUGH:
        return
    for worker, size in zip(SURVIVORS, growths(rounds), strict=True):
        if size > GROWTH:
            yield f"{worker}: the second half added {size / MB:.1f} MB"


# ── the run ─────────────────────────────────────────────────────────────────────────────────────


async def run(soak: Soak, versions: int, rounds: int) -> list[str]:
    """Run the rounds; return what is wrong."""
    each = versions // rounds
    for kind in KINDS:  # every table and path has been used
        async with asyncio.timeout(PATIENCE):
            await soak.round(3 * BURST, kind)
    before, found, begun = await soak.rest(), list[list[Sample]](), time.monotonic()
    first = soak.published
    for number in range(rounds):
        kind = KINDS[number % len(KINDS)]
        async with asyncio.timeout(PATIENCE + each):
            await soak.round(each, kind)
        found.append(await samples())
        cells = ", ".join(
            f"{one.memory / MB:.1f} MB {one.descriptors} {one.mapped}" for one in found[-1]
        )
        seconds = time.monotonic() - begun
        print(
            f"{soak.published - first:7,} versions {seconds:5.0f} s  {kind:8}  {cells}", flush=True
        )
    after = await soak.rest()
    show(before, after)
    print(
        f"\n{soak.published - first:,} versions, {rounds} kills, which ended {soak.losses} calls; "
        f"this process saw {soak.seen:,} versions; {time.monotonic() - begun:.0f} s"
    )
    if len(found) >= ENOUGH:
        more = ", ".join(f"{size / MB:+.1f}" for size in growths(found))
        print(f"memory of {' and '.join(SURVIVORS)} from the first half to the second: {more} MB")
    return [*await soak.found(), *left(before, after), *grown(found)]


def show(before: Sequence[Sample], after: Sequence[Sample]) -> None:
    """Print what the processes hold at the start and at the end."""
    table = [("at rest", "memory, MB", "descriptors", "mapped segments", "tasks", "pending calls")]
    for worker, was, now in zip(SURVIVORS, before, after, strict=True):
        counts = [f"{one} → {other}" for one, other in zip(was[1:], now[1:], strict=True)]
        memory = f"{was.memory / MB:.1f} → {now.memory / MB:.1f}"
        table.append((worker, memory, counts[0], counts[1], counts[2], counts[3]))
    print()
    lay_out(table)


async def main(given: argparse.Namespace) -> list[str]:
    """Run the soak; return its problems."""
    world = testing.world if given.quick else aiorpc.local_world  # children start sooner
    restarts = given.rounds + len(KINDS)
    async with world(["learner", *NEAR, *FAR], max_restarts=restarts):
        learner = await supervised("learner", Learner)
        near = await supervised(NEAR, Follower.start)
        far = await supervised(FAR, Follower.start, "other")
        soak = Soak(learner, Group([*near, *far]))
        await soak.start()
        try:
            return await run(soak, given.versions, given.rounds)
        except Exception as exc:
            return [f"stopped by {exc!r}", *soak.problems]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ten thousand versions of weights, with kills.")
    parser.add_argument("--quick", action="store_true", help="300 versions and 3 kills")
    parser.add_argument("--versions", type=int, metavar="N", help="versions (10,000)")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds with a kill each (60)")
    return parse_sizes(parser, versions=(300, 10_000), rounds=(3, 60))


if __name__ == "__main__":
    end(asyncio.run(main(arguments())))
