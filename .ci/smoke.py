"""A world of one and a world of two children, in an installed copy."""

import asyncio
import os

import torch

import aiorpc_torch as aiorpc


class Counter:
    """An object on a worker."""

    def __init__(self, start: int) -> None:
        self.value = torch.tensor(start)

    async def add(self, amount: int) -> torch.Tensor:
        """Add an amount; return the sum."""
        self.value += amount
        return self.value

    @aiorpc.batched(max_size=8)
    async def double(self, numbers: list[int]) -> list[int]:
        """Return each number twice as large."""
        return [2 * number for number in numbers]


async def use(worker: str) -> None:
    """Make calls of each kind."""
    counter = await aiorpc.create(worker, Counter, 5)
    assert (await aiorpc.remote(counter).add(2)).item() == 7
    doubled = await asyncio.gather(*(aiorpc.remote(counter).double(n) for n in range(4)))
    assert doubled == [0, 2, 4, 6]


async def main() -> None:
    """Enter one world after the other."""
    async with aiorpc.local_world(0) as me:
        await use(me.name)
    async with aiorpc.local_world(["a", "b"]) as me:
        await asyncio.gather(*map(use, me.peers))
        pids = await asyncio.gather(*(aiorpc.call(peer, os.getpid) for peer in me.peers))
        assert len({os.getpid(), *pids}) == 3


if __name__ == "__main__":
    asyncio.run(main())
    print("worlds of one and of three: ok")
