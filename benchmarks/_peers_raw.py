"""torch.distributed.rpc as it is, for `benchmarks.peers`.

Its strongest form: the callee addressed by its `WorkerInfo`, no timeout to track, `wait_all` for
many calls, and for batches the tutorial's pattern with a batch that is always full. Its callers
block, so no loop can lag, and each method that sleeps holds a thread.
"""

import asyncio
import os
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_rpc import WorkerInfo
from torch.distributed import rpc
from torch.futures import Future, wait_all

from ._compare import freeze
from ._peers_process import process
from ._peers_work import BIG, MB, NAP, SMALL, WINDOW, Peer, Sizes
from .batching import CALLERS, select

new_event_loop = asyncio.new_event_loop
THREADS = 64  # torch's default of 16 makes no other row faster and the naps three times slower


def echo(x: Tensor) -> Tensor:
    return x


def nap() -> None:
    time.sleep(NAP)


class Raw(Peer):
    def __init__(self, server: WorkerInfo) -> None:
        self.server = server
        self.states = list(enumerate(torch.rand(CALLERS, 4)))

    async def lone(self, sizes: Sizes) -> float:
        times = []
        for _ in range(sizes.lone):
            start = perf_counter()
            self._wait_for(echo, SMALL)
            times.append(perf_counter() - start)
        return median(times) * 1e6

    async def crowd(self, sizes: Sizes) -> float:
        start = perf_counter()
        wait_all([self._send(echo, SMALL) for _ in range(sizes.crowd)])
        return sizes.crowd / (perf_counter() - start)

    async def window(self, sizes: Sizes) -> float:
        start = perf_counter()
        flying: deque[Future[Tensor]] = deque()
        for _ in range(sizes.window):
            if len(flying) == WINDOW:
                flying.popleft().wait()
            flying.append(self._send(echo, SMALL))
        wait_all(list(flying))
        return sizes.window / (perf_counter() - start)

    async def batched(self, sizes: Sizes) -> float:
        start = perf_counter()
        for _ in range(sizes.steps):
            wait_all([self._send(select, *state) for state in self.states])
        return CALLERS * sizes.steps / (perf_counter() - start)

    async def naps(self, sizes: Sizes) -> float:
        start = perf_counter()
        wait_all([self._send(nap) for _ in range(sizes.naps)])
        return perf_counter() - start

    async def _carried(self, x: Tensor, trips: int) -> float:
        start = perf_counter()
        for _ in range(trips):
            self._wait_for(echo, x)
        return 2 * trips * x.nbytes / MB / (perf_counter() - start)

    async def _carried_any(self, x: Any, trips: int) -> float:
        start = perf_counter()
        for _ in range(trips):
            self._wait_for(echo, x)
        return 2 * trips * BIG.nbytes / MB / (perf_counter() - start)

    async def lag(self, sizes: Sizes) -> float | None:
        return None

    def _send(self, function: Callable[..., object], *args: object) -> "Future[Any]":
        sent: Future[Any] = rpc.rpc_async(self.server, function, args=args, timeout=0)
        return sent

    def _wait_for(self, function: Callable[..., object], *args: object) -> None:
        rpc.rpc_sync(self.server, function, args=args, timeout=0)


@asynccontextmanager
async def start(scratch: Path) -> AsyncIterator[Peer]:
    where = f"file://{scratch}/meeting"
    with process(serve, where):
        join("client", 0, where)
        try:
            yield Raw(rpc.get_worker_info("server"))
        finally:
            rpc.shutdown()


def serve(_: Connection, where: str) -> None:
    join("server", 1, where)
    freeze()
    rpc.shutdown()  # serves until the client shuts down too


def join(name: str, rank: int, where: str, size: int = 2) -> None:
    # A warning about the process group that init_rpc makes.
    warnings.filterwarnings("ignore", message="You are using a Backend .*ProcessGroupGloo")
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=THREADS, init_method=where)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name, rank=rank, world_size=size, rpc_backend_options=options
    )
