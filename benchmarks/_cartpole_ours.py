"""A process of `examples.cartpole` for `benchmarks.cartpole`."""

import asyncio
import math
from argparse import Namespace
from time import perf_counter, process_time
from typing import Any

import aiorpc_torch as aiorpc
from examples.cartpole import gather_team

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
        stop_timeout=math.inf,  # observers serve until the agent is done
        on_failure="stop",
    ) as me:
        if rank == 0:
            report.send(await _measure(me, sizes))


async def _measure(me: aiorpc.Worker, sizes: Sizes) -> Times:
    options = Namespace(seed=0, device=sizes.device, environments=sizes.each, steps=sizes.warm)
    team = await gather_team(me.peers, options)
    times: Times = {"batched": [], "unbatched": []}
    for method in METHODS.values():
        await team.train(method, 1, 60.0)
    team.steps = sizes.steps
    for _ in range(sizes.rounds):
        for name, method in METHODS.items():
            before, start, cpu = team.agent.steps, perf_counter(), process_time()
            await team.train(method, 1, 60.0)
            steps = team.agent.steps - before
            times[name].append((steps, perf_counter() - start, process_time() - cpu))
    return times
