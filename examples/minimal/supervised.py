"""Environments whose processes die: each is made again, and the work goes on."""

import asyncio
import os
import random

import aiorpc_torch as aiorpc


class Env:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def rollout(self, number: int) -> tuple[int, int]:
        await asyncio.sleep(0.005)
        return number, os.getpid()


async def main() -> None:
    async with aiorpc.local_world(["env0", "env1"], max_restarts=2):
        envs = await aiorpc.supervised(["env0", "env1"], Env, aiorpc.each([0, 1]))
        processes = set()
        async for number, process in envs.map(Env.rollout, range(100)):
            processes.add(process)
            if number == 20:
                aiorpc.testing.kill("env0")  # both: until they are back, the rollouts wait
                aiorpc.testing.kill("env1")
        print("rollouts:", number + 1)
        print("processes:", len(processes))
        print(*envs, sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
