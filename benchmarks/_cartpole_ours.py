"""A process of `examples.cartpole` for `benchmarks.cartpole`."""

import asyncio
from argparse import Namespace
from time import perf_counter, process_time
from typing import Any

import aiorpc_torch as aiorpc
from examples.cartpole import new_team, train

from ._cartpole_work import Sizes, Times

METHODS = {"batched": "select", "unbatched": "select_alone"}


def live(rank: int, sizes: Sizes, where: str, report: Any) -> None:
    """Run one worker. The agent's process sends its measurements to `report`."""
    asyncio.run(_live(rank, sizes, where, report))


async def _live(rank: int, sizes: Sizes, where: str, report: Any) -> None:
    async with aiorpc.worker(
        f"observer{rank - 1}" if rank else "agent",
        rank=rank,
        world_size=sizes.processes + 1,
        init_method=where,
        transports=sizes.transports,
        on_failure="stop",
    ) as me:
        if rank == 0:
            report.send(await _measure(me, sizes))


async def _measure(me: aiorpc.types.Worker, sizes: Sizes) -> Times:
    options = Namespace(seed=0, device=sizes.device, environments=sizes.each)
    agent, observers = await new_team(me.peers, options)
    times: Times = {"batched": [], "unbatched": []}
    for method in METHODS.values():
        await train(agent, observers, method, sizes.warm)
    for _ in range(sizes.rounds):
        for name, method in METHODS.items():
            start, cpu = perf_counter(), process_time()
            episodes = await train(agent, observers, method, sizes.steps)
            steps = sum(len(each.actions) for each in episodes)
            times[name].append((steps, perf_counter() - start, process_time() - cpu))
    return times
