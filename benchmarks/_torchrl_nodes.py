"""TorchRL's replay buffer and collecting nodes, as the processes of `benchmarks.torchrl_rpc`."""

import asyncio
import os
from importlib import import_module
from typing import Any

import torch
from torch.distributed import rpc

import aiorpc_torch as aiorpc

tensordict: Any = import_module("tensordict")
data: Any = import_module("torchrl.data")

STORED = 1001  # transitions
PATIENCE = 120.0  # seconds for a call


def options(init_method: str) -> rpc.TensorPipeRpcBackendOptions:
    return rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=16, init_method=init_method, rpc_timeout=PATIENCE
    )


class Buffer(data.RemoteTensorDictReplayBuffer):  # type: ignore[misc]
    """A buffer that is filled as in TorchRL's benchmark, with observations of `pixels` floats."""

    def __init__(self, pixels: int) -> None:
        super().__init__(storage=data.LazyTensorStorage(2 * STORED), collate_fn=lambda x: x)
        keys = ("observation", "next_observation")
        found = {key: torch.randn(STORED, pixels) for key in keys}
        self.extend(tensordict.TensorDict(found, batch_size=[STORED]))


def hold_buffer(init_method: str) -> None:
    """Run the process of the buffer. TorchRL's waits in a debugger until it is ended."""
    rpc.init_rpc("buffer", rank=1, rpc_backend_options=options(init_method))  # type: ignore[no-untyped-call]
    asyncio.run(_serve())
    rpc.shutdown(graceful=False)


async def _serve() -> None:
    async with aiorpc.attach() as me:
        await me.serve("trainer")


def collect(rank: int, size: int, port: int) -> None:
    """Run a collecting node: TorchRL's own function with two more lines."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group(backend="gloo", rank=rank, world_size=size)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"COLLECTOR_NODE_{rank}",
        rank=rank,
        world_size=size,
        rpc_backend_options=options("env://"),
    )
    with aiorpc.in_thread(aiorpc.attach()):
        rpc.shutdown()
    torch.distributed.destroy_process_group()
