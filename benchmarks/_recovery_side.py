"""A process of `benchmarks.recovery`: the learner, or the worker that follows it.

Main: `follower` or `learner`, the megabytes of the weights, and the address of the world.
"""

import asyncio
import json
import sys
import time

import torch

import aiorpc_torch as aiorpc
from aiorpc_torch.training import Weights, follow, recover

TENSORS = 50


def tell(**seconds: float) -> None:
    print(json.dumps(seconds), flush=True)


async def hold(address: str) -> None:
    """Follow the learner, and keep what it has published."""
    async with aiorpc.worker("follower", init_method=address, rank=0, world_size=2):
        async with await follow("weights") as follower:
            tell(version=await follower.wait(1))
            await asyncio.Event().wait()


async def learn(megabytes: int, address: str) -> None:
    """Begin with what a follower holds; tell how long that took."""
    async with aiorpc.worker("learner", init_method=address, rank=1, world_size=2):
        entered = time.monotonic()
        found = await recover("weights")
        recovered = time.monotonic()
        if found is None:
            size = megabytes * 1_000_000 // 4 // TENSORS
            tree = {f"layer{number}": torch.rand(size) for number in range(TENSORS)}
            weights = Weights(tree)
        else:
            tree = found.tree
            weights = Weights(tree, version=found.version)
        aiorpc.register("weights", weights)
        for each in tree.values():
            each += 1
        await weights.publish(tree)
        published = time.monotonic()
        tell(
            **{
                "from its entry to its weights": recovered - entered,
                "from its entry to the next version": published - entered,
            }
        )
        await asyncio.Event().wait()


if __name__ == "__main__":
    side, size, where = sys.argv[1:]
    asyncio.run(hold(where) if side == "follower" else learn(int(size), where))
