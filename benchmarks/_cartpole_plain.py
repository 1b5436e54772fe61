"""A process of `examples._reference.cartpole` for `benchmarks.cartpole`."""

import gc
import warnings
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

from torch.distributed import rpc

from examples._reference import cartpole

from ._cartpole_work import Sizes, Times

METHODS = {"batched": cartpole.select, "unbatched": cartpole.select_alone}


def live(rank: int, sizes: Sizes, where: str, report: Any) -> None:
    """Run one worker. The agent's process sends its measurements to `report`."""
    be_worker(rank, sizes, where, report, _measure)


def be_worker(
    rank: int, sizes: Sizes, where: str, report: Any, measure: Callable[[Sizes], Times]
) -> None:
    """Run one worker of a program in plain torch, whose agent calls `measure`."""
    gc.freeze()
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch's own start warns (2.15)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"observer{rank - 1}" if rank else "agent",
        rank=rank,
        world_size=sizes.processes + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=where, _transports=sizes.transports
        ),
    )
    if rank == 0:
        report.send(measure(sizes))
    rpc.shutdown()


def _measure(sizes: Sizes) -> Times:
    team = cartpole.new_team(0, sizes.processes)
    times: Times = {"batched": [], "unbatched": []}
    for method in METHODS.values():
        cartpole.train(team, method, sizes.warm)
    for _ in range(sizes.rounds):
        for name, method in METHODS.items():
            before, start, cpu = cartpole.agent.steps, perf_counter(), process_time()
            cartpole.train(team, method, sizes.steps)
            steps = cartpole.agent.steps - before
            times[name].append((steps, perf_counter() - start, process_time() - cpu))
    return times
