"""TorchRL's inference server, for `benchmarks.peers`: it batches calls, and makes no others.

In the form of `_torchrl_ways`. Its clients have no coroutines, so one thread sends the requests of
all callers before it waits for the first answer, over and over: each batch may be full.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ._peers_work import Peer, Sizes
from ._torchrl_ways import serving
from .batching import CALLERS

TensorDict: Any = import_module("tensordict").TensorDict
new_event_loop = asyncio.new_event_loop


class TorchRL(Peer):
    only = ("batched",)

    def __init__(self, clients: list[Any]) -> None:
        self.clients = clients

    async def batched(self, sizes: Sizes) -> float:
        states = torch.rand(CALLERS, 4)
        start = perf_counter()
        for _ in range(sizes.steps):
            requests = [TensorDict({"observation": state}) for state in states]
            asked = zip(self.clients, requests, strict=True)
            futures = [client.submit(request) for client, request in asked]
            for future in futures:
                int(future.result()["action"])
        return CALLERS * sizes.steps / (perf_counter() - start)


@asynccontextmanager
async def start(scratch: Path) -> AsyncIterator[Peer]:
    with serving(CALLERS) as clients:
        yield TorchRL(clients)
