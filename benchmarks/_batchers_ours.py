"""A `@batched` method, for `benchmarks.batchers`: as a user gets it by default."""

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from aiorpc_torch import batched, create, local_world, remote

from ._batchers_work import Figures, asked
from .batching import actions, new_policy


class Agent:
    def __init__(self) -> None:
        self.policy = new_policy()

    @batched(max_size=64, stack=True)
    async def act(self, states: Tensor) -> list[int]:
        return actions(self.policy, states)


def figures(clients: Sequence[int], seconds: float) -> dict[int, Figures]:
    return asyncio.run(_figures(clients, seconds))


async def _figures(clients: Sequence[int], seconds: float) -> dict[int, Figures]:
    async with local_world(["server"]):
        agent = remote(await create("server", Agent))
        return {each: await asked(agent.act, [*torch.rand(each, 4)], seconds) for each in clients}
