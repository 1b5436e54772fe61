"""How long do new weights take to reach many followers of one host?

A learner publishes 64 MB in 64 tensors to 8 followers in processes of their own. The time is from
the call of `publish` to the end of the last follower's `wait`. It is compared with one copy of as
many bytes, made in the learner's process just before: into new memory, as `clone` does, and into
memory that is in use (`copy_`). Every tensor changes in every version.

With `--frozen N` (megabytes) the tree has a tensor besides that does not change, as the base model
of an adapter; the bytes of tensors that each version sent are printed.

    python -m benchmarks.weights [--quick] [--repeat N] [--followers N] [--megabytes N] [--frozen N]
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from statistics import median

import torch

from aiorpc_torch import RRef, create, local_world, register, remote, training
from aiorpc_torch.training import follow
from tests.support.followers import Counting

from ._compare import parse

TENSORS = 64
MB = 1_000_000


class Learner:
    """Publishes, and makes copies in the same process."""

    def __init__(self, megabytes: int, frozen: int) -> None:
        size = megabytes * MB // 4 // TENSORS
        self.state = {f"layer{number}": torch.ones(size) for number in range(TENSORS)}
        self.frozen = {"frozen": torch.rand(frozen * MB // 4)}
        self.whole = torch.ones(size * TENSORS)
        self.target = torch.ones(size * TENSORS)
        self.weights = Counting(self.state | self.frozen)
        register("policy", self.weights)

    async def publish(self) -> float:
        for each in self.state.values():
            each += 1
        return await timed(self.weights.publish(self.state | self.frozen))

    def sent(self) -> float:
        """Return the megabytes of the tensors in the last answer to a follower."""
        return self.weights.sent[-1] / MB

    def copies(self) -> tuple[float, float]:
        """Return the seconds of a copy into new memory, and of one into used memory."""
        return took(self.whole.clone), took(lambda: self.target.copy_(self.whole))


class Follower:
    policy: training.Follower

    async def start(self) -> None:
        self.policy = await follow("policy", on="learner")

    async def wait(self, version: int) -> float:
        await self.policy.wait(version)
        return self.policy.pause


async def timed(awaitable: object) -> float:
    begun = time.perf_counter()
    await awaitable  # type: ignore[misc]
    return time.perf_counter() - begun


def took(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


async def measure(given: argparse.Namespace) -> list[tuple[float, ...]]:
    """Return for each repetition the seconds of both copies, of `publish`, of all, and a pause."""
    names = [f"follower{number}" for number in range(given.followers)]
    async with local_world(["learner", *names], start_timeout=600.0):
        learner: RRef[Learner] = await create("learner", Learner, given.megabytes, given.frozen)
        followers = await create(names, Follower)
        await remote(followers).start()
        found = list[tuple[float, ...]]()
        for version in range(1, given.repeat + 4):  # the first ones make their memory
            waiting = asyncio.ensure_future(remote(followers).wait(version))
            copies = await remote(learner).copies()
            await asyncio.sleep(0.2)  # until all followers wait
            begun = time.perf_counter()
            published = await remote(learner).publish()
            pauses = await waiting
            found.append((*copies, published, time.perf_counter() - begun, max(pauses)))
        if given.frozen:
            all_of_it = given.megabytes + given.frozen
            print(f"of {all_of_it} MB sent {await remote(learner).sent():.1f} MB")
        return found[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Weights to the followers of one host.")
    parser.add_argument("--followers", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--frozen", type=int, default=0)
    given = parse(parser)
    if given.quick:
        given.followers = 2
    runs = asyncio.run(measure(given))
    names = ("clone()", "copy_()", "publish()", "all followers", "longest pause")
    for name, seconds in zip(names, zip(*runs, strict=True), strict=True):
        print(f"{name:<14} {1e3 * median(seconds):8.2f} ms")
    print(f"all followers / clone(): {median(each[3] / each[0] for each in runs):.2f}")
    print(f"all followers / copy_(): {median(each[3] / each[1] for each in runs):.2f}")


if __name__ == "__main__":
    main()
