"""aiorpc_torch, for `benchmarks.peers`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.rpc import RRef

import aiorpc_torch as aiorpc
from aiorpc_torch import remote

from ._peers_work import NAP, Peer
from .batching import CALLERS, actions, new_policy

new_event_loop = asyncio.new_event_loop


class Server:
    def __init__(self) -> None:
        self.policy = new_policy()

    async def echo(self, x: Tensor) -> Tensor:
        return x

    async def nap(self) -> None:
        await asyncio.sleep(NAP)

    @aiorpc.batched(max_size=CALLERS)
    async def select(self, states: list[Tensor]) -> list[int]:
        return actions(self.policy, torch.stack(states))

    async def count(self, items: int) -> AsyncIterator[int]:
        for item in range(items):
            yield item


class Ours(Peer):
    freezes = True

    def __init__(self, server: RRef[Server]) -> None:
        self.server = server

    def echo(self, x: Tensor) -> Awaitable[Tensor]:
        return remote(self.server).echo(x)

    def nap(self) -> Awaitable[object]:
        return remote(self.server).nap()

    def select(self, state: Tensor) -> Awaitable[int]:
        return remote(self.server).select(state)

    def count(self, items: int) -> AsyncIterator[int] | None:
        numbers: Any = remote(self.server).count(items)
        if hasattr(numbers, "__aiter__"):
            found: AsyncIterator[int] = numbers
            return found
        numbers.close()  # a coroutine: this version has no streams
        return None


@asynccontextmanager
async def start(scratch: Path) -> AsyncIterator[Peer]:
    async with aiorpc.local_world(["server"]):
        yield Ours(await aiorpc.create("server", Server))
