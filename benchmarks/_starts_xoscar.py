"""xoscar actors, each in a process of its own that imports torch, for `benchmarks.starts`."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from torch import Tensor

from ._starts_work import HOUR, report

xo: Any = import_module("xoscar")
Actor: Any = xo.StatelessActor


class Counter(Actor):  # type: ignore[misc]
    """An actor that holds a number. Many live in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0

    async def pid(self) -> int:
        return os.getpid()

    async def take(self, x: Tensor) -> float:
        return float(x[0])

    async def wait(self) -> None:
        await asyncio.sleep(HOUR)


class Workers:
    def __init__(self, addresses: Sequence[str], actors: Sequence[Any]) -> None:
        self.addresses = addresses
        self.actors = actors

    async def pids(self) -> Sequence[int]:
        found: list[int] = await asyncio.gather(*(each.pid() for each in self.actors))
        return found

    async def create(self, count: int) -> Any:
        of = len(self.addresses)
        return await asyncio.gather(
            *(xo.create_actor(Counter, address=self.addresses[at % of]) for at in range(count))
        )

    async def take(self, x: Tensor) -> Any:
        return await asyncio.gather(*(each.take(x) for each in self.actors))

    async def wait(self) -> Any:
        return await self.actors[-1].wait()


@asynccontextmanager
async def start(size: int) -> AsyncIterator[Workers]:
    pool = await xo.create_actor_pool("127.0.0.1", n_process=size)
    try:
        addresses = pool.sub_processes.keys()
        actors = [xo.create_actor(Counter, address=each) for each in addresses]
        yield Workers([*addresses], await asyncio.gather(*actors))
    finally:
        await pool.stop()


if __name__ == "__main__":
    report(start)
