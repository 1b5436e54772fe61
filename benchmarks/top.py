"""The picture of `top` in the documentation: a program with two faults, as `top` shows it.

    python -m benchmarks.top --plot docs/figures/top.svg

One environment is slower than the others, and the policy blocks its event loop.
"""

import argparse
import asyncio
import os
import time

import aiorpc_torch as aiorpc
from aiorpc_torch._top.terminal import look
from aiorpc_torch._top.view import save

WARM_UP = 3.0  # seconds before the first look


class Env:
    """An environment whose step takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def step(self) -> None:
        await asyncio.sleep(self.seconds)


class Policy:
    """A policy that computes on its event loop."""

    @aiorpc.batched(max_size=8)
    async def act(self, states: list[int]) -> list[int]:
        time.sleep(0.2)  # noqa: ASYNC251 - the fault
        return states


async def main(path: str) -> None:
    """Run the program, and draw its workers."""
    names = ["env0", "env1", "env2"]
    async with aiorpc.local_world([*names, "policy"]):
        envs = await aiorpc.create(names, Env, aiorpc.each([0.047, 0.002, 0.002]))
        policy = await aiorpc.create("policy", Policy)

        async def step(env: aiorpc.RRef[Env]) -> None:
            while True:
                await aiorpc.remote(env).step()

        async def act() -> None:
            while True:
                await aiorpc.remote(policy).act(0)

        steps = [step(env) for env in envs] + [act() for _ in range(8)]
        running = [asyncio.create_task(each) for each in steps]
        await asyncio.sleep(WARM_UP)
        rows, found = await asyncio.to_thread(look, os.getpid())
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    save(path, rows, found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", required=True, help="file of the picture, SVG")
    asyncio.run(main(parser.parse_args().plot))
