"""A process of `benchmarks.parameter_server_hosts`: rank 0 is the server, the others are trainers.

Main: `ours` or `torch`, the rank, the number of rounds, and that of the model's floats. Rank 0
prints the seconds of each round as one line of JSON.
"""

import asyncio
import json
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

import aiorpc_torch as aiorpc
from aiorpc_torch import Round, batched, lookup, register, remote

INIT = "tcp://10.94.7.1:29512"
TRAINERS = 8
RATE = 0.01
WARM_UP = 2  # rounds


class Model:
    """The parameters, and the times of the steps."""

    def __init__(self, size: int) -> None:
        self.parameters = torch.zeros(size)
        self.steps: list[float] = []

    def step(self, gradients: list[Tensor]) -> Tensor:
        """Return new parameters, after a step with the mean of the gradients."""
        total = gradients[0].clone()
        for each in gradients[1:]:
            total += each
        self.parameters = self.parameters - RATE / len(gradients) * total
        self.steps.append(time.perf_counter())
        return self.parameters

    def report(self) -> None:
        """Print the seconds of each round."""
        steps = self.steps[WARM_UP:]
        print(json.dumps([after - before for before, after in pairwise(steps)]), flush=True)


# ── this library ────────────────────────────────────────────────────────────────────────────────


class Server:
    """Takes one step for all trainers."""

    def __init__(self, size: int) -> None:
        self.model = Model(size)

    @batched(Round(TRAINERS))
    def update(self, gradients: list[Tensor]) -> Tensor:
        return self.model.step(gradients)


async def ours(rank: int, rounds: int, size: int) -> None:
    world = {"rank": rank, "world_size": TRAINERS + 1, "init_method": INIT}
    async with aiorpc.worker(f"w{rank}", **world) as me:  # type: ignore[arg-type]
        if rank == 0:
            server = Server(size)
            register("server", server)
            await me.serve()
            server.model.report()
        else:
            server_rref: Any = await lookup("server", on="w0")
            parameters = torch.zeros(size)
            for _ in range(rounds):
                parameters = await remote(server_rref).update(parameters + rank)


# ── plain torch: the pattern of PyTorch's tutorial ──────────────────────────────────────────────


class PlainServer:
    """Takes one step for all trainers, by `async_execution`."""

    def __init__(self, size: int) -> None:
        self.model = Model(size)
        self.lock = threading.Lock()
        self.future: Future[Tensor] = Future()
        self.gradients: list[Tensor] = []

    @staticmethod
    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def update(server: "rpc.RRef[PlainServer]", gradient: Tensor) -> "Future[Tensor]":
        self: PlainServer = server.local_value()
        with self.lock:
            self.gradients.append(gradient)
            future = self.future
            if len(self.gradients) == TRAINERS:
                parameters, self.gradients = self.model.step(self.gradients), []
                self.future = Future()
                future.set_result(parameters)
        return future


def plain(rank: int, rounds: int, size: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=INIT, num_worker_threads=TRAINERS + 2)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"w{rank}", rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options
    )
    if rank == 0:
        server = rpc.RRef(PlainServer(size))
        trainers = [
            rpc.rpc_async(f"w{each + 1}", train_plainly, (server, rounds, size, each + 1))
            for each in range(TRAINERS)
        ]
        torch.futures.wait_all(trainers)
        server.local_value().model.report()
        del server
    rpc.shutdown()


def train_plainly(server: "rpc.RRef[PlainServer]", rounds: int, size: int, rank: int) -> None:
    parameters = torch.zeros(size)
    for _ in range(rounds):
        parameters = rpc.rpc_sync(
            server.owner(), PlainServer.update, (server, parameters + rank), timeout=60
        )


if __name__ == "__main__":
    side, numbers = sys.argv[1], [int(each) for each in sys.argv[2:]]
    if side == "ours":
        asyncio.run(ours(*numbers))
    else:
        plain(*numbers)
