"""A Monarch actor in a process of this host, for `benchmarks.peers`.

Its strongest form: concurrent endpoints, called on one actor. A stream is a port of the client to
which the actor sends. Calls are batched by a `Batcher` written by hand.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from ._compare import freeze
from ._peers_work import NAP, Batcher, Peer, answer

monarch: Any = import_module("monarch.actor")
new_event_loop = asyncio.new_event_loop


class Server(monarch.Actor):  # type: ignore[misc]
    def __init__(self) -> None:
        self.batcher = Batcher(answer())
        freeze()

    @monarch.concurrent_endpoint  # type: ignore[untyped-decorator]
    async def echo(self, x: Tensor) -> Tensor:
        return x

    @monarch.concurrent_endpoint  # type: ignore[untyped-decorator]
    async def nap(self) -> None:
        await asyncio.sleep(NAP)

    @monarch.concurrent_endpoint  # type: ignore[untyped-decorator]
    async def select(self, state: Tensor) -> int:
        return await self.batcher.ask(state)

    @monarch.concurrent_endpoint  # type: ignore[untyped-decorator]
    async def count(self, port: Any, items: int) -> None:
        for item in range(items):
            port.send(item)


class Monarch(Peer):
    def __init__(self, server: Any) -> None:
        self.server = server

    def echo(self, x: Tensor) -> Awaitable[Tensor]:
        echoed: Awaitable[Tensor] = self.server.echo.call_one(x)
        return echoed

    def nap(self) -> Awaitable[object]:
        napping: Awaitable[object] = self.server.nap.call_one()
        return napping

    def select(self, state: Tensor) -> Awaitable[int]:
        action: Awaitable[int] = self.server.select.call_one(state)
        return action

    async def count(self, items: int) -> AsyncIterator[int]:
        port, received = monarch.Channel.open()
        counting = self.server.count.call_one(port, items)
        for _ in range(items):
            yield await received.recv()
        await counting


@asynccontextmanager
async def start(scratch: Path) -> AsyncIterator[Peer]:
    processes = monarch.this_host().spawn_procs(per_host={"gpus": 1})
    try:
        yield Monarch(processes.spawn("server", Server))
    finally:
        await processes.stop()
