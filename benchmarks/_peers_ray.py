"""A Ray actor, for `benchmarks.peers`.

Its strongest form: an async actor, and numpy arrays, which Ray passes without copies; it pickles
tensors. `serve.batch` is a queue in the actor's own process, as is the `Batcher` written by hand.
"""

import asyncio
import importlib
import os
import warnings
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._compare import freeze
from ._peers_work import MB, NAP, Batcher, Peer, answer

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray: Any = importlib.import_module("ray")
new_event_loop = asyncio.new_event_loop

# Ray's arrays lie in its shared memory and are read-only.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Server:
    def __init__(self) -> None:
        self.batcher = Batcher(answer())
        freeze()

    async def echo(self, x: Any) -> Any:
        return torch.from_numpy(x).numpy()

    async def back(self, x: Any) -> Any:
        return x

    async def nap(self) -> None:
        await asyncio.sleep(NAP)

    async def select(self, state: Any) -> int:
        return await self.batcher.ask(torch.from_numpy(state))

    async def count(self, items: int) -> AsyncIterator[int]:
        for item in range(items):
            yield item


class Ray(Peer):
    def __init__(self, server: Any) -> None:
        self.server = server

    async def echo(self, x: Tensor) -> Tensor:
        return torch.from_numpy(await self.server.echo.remote(x.numpy()))

    def echo_any(self, x: Any) -> Awaitable[Any]:
        echoed: Awaitable[Any] = self.server.back.remote(x)
        return echoed

    def nap(self) -> Awaitable[object]:
        napping: Awaitable[object] = self.server.nap.remote()
        return napping

    def select(self, state: Tensor) -> Awaitable[int]:
        action: Awaitable[int] = self.server.select.remote(state.numpy())
        return action

    async def count(self, items: int) -> AsyncIterator[int]:
        async for item in self.server.count.options(num_returns="streaming").remote(items):
            yield await item


@asynccontextmanager
async def start(scratch: Path) -> AsyncIterator[Peer]:
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=2_048 * MB,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(scratch),
    )
    try:
        # An async actor runs 1,000 calls at a time unless told otherwise.
        yield Ray(ray.remote(Server).options(max_concurrency=4_000).remote())
    finally:
        ray.shutdown()
