"""Programs with one fault each, for `top` to name. They run until they are cancelled."""

import asyncio

import aiorpc_torch as aiorpc
from aiorpc_torch import batched, create, each, remote


class Env:
    """An environment whose step takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def step(self) -> None:
        await asyncio.sleep(self.seconds)


class Model:
    """A model that answers 8 calls in 0.05 s."""

    @batched(max_size=8)
    async def infer(self, items: list[int]) -> list[int]:
        await asyncio.sleep(0.05)
        return items


async def straggler() -> None:
    """Wait for the slowest of three environments in every round."""
    async with aiorpc.local_world(["env0", "env1", "env2"]):
        envs = await create(["env0", "env1", "env2"], Env, each([0.005, 0.005, 0.15]))
        while True:
            await remote(envs).step()


async def unbounded() -> None:
    """Make 20 calls in 0.05 s."""
    async with aiorpc.local_world(["model"]):
        model = await create("model", Model)
        async with asyncio.TaskGroup() as calls:
            while True:
                for item in range(20):
                    calls.create_task(remote(model).infer(item))
                await asyncio.sleep(0.05)
