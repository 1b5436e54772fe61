"""Calls of a program of `rpc.init_rpc` become awaitable one by one; its server is passive."""

import asyncio
import tempfile

import torch
import torch.multiprocessing as mp
from torch.distributed import rpc

import aiorpc_torch as aiorpc


class ParameterServer:
    def __init__(self) -> None:
        self.weight = torch.zeros(2)

    def add(self, gradient: torch.Tensor) -> torch.Tensor:  # called by `rpc_sync` as before
        self.weight -= 0.1 * gradient
        return self.weight.clone()

    @aiorpc.batched(aiorpc.Round(2), stack=True)
    def step(self, gradients: torch.Tensor) -> torch.Tensor:  # for all
        return self.add(gradients.mean(0))


SERVER = ParameterServer()


def server() -> "rpc.RRef[ParameterServer]":
    return rpc.RRef(SERVER)


async def train(rank: int) -> float:
    async with aiorpc.attach():
        ps = await aiorpc.call("ps", server)
        weight = ps.rpc_sync().add(torch.zeros(2))  # a call that was not replaced yet
        for _ in range(100):
            weight = await aiorpc.remote(ps).step(2 * (weight - torch.tensor([1.0, float(rank)])))
        return float(weight[1])


def main(rank: int, folder: str) -> None:
    name = f"trainer{rank - 1}" if rank else "ps"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
    rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        with aiorpc.in_thread(aiorpc.attach()):
            rpc.shutdown()  # serves until the trainers are here too
    else:
        print(name, round(asyncio.run(train(rank)), 3), flush=True)
        rpc.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=3, start_method="fork")
