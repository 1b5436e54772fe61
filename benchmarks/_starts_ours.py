"""Workers of a local world, for `benchmarks.starts`."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, call, create, remote

from ._starts_work import HOUR, report


class Counter:
    """An object that holds a number."""

    def __init__(self) -> None:
        self.value = 0

    def take(self, x: Tensor) -> float:
        return float(x[0])


async def pid() -> int:
    return os.getpid()


class Workers:
    def __init__(self, me: aiorpc.types.Worker) -> None:
        self.me = me
        self.takers: Group[Counter] | None = None

    async def pids(self) -> Sequence[int]:
        return await asyncio.gather(*(call(peer, pid) for peer in self.me.peers))

    async def create(self, count: int) -> Any:
        names = [self.me.peers[number % len(self.me.peers)] for number in range(count)]
        return await create(names, Counter)

    async def take(self, x: Tensor) -> Any:
        self.takers = self.takers or await create(self.me.peers, Counter)
        return await remote(self.takers).take(x)

    async def wait(self) -> Any:
        return await call(self.me.peers[-1], asyncio.sleep, HOUR)


@asynccontextmanager
async def start(size: int) -> AsyncIterator[Workers]:
    way: Any = sys.argv[2]
    async with aiorpc.local_world(size, start=way, start_timeout=800.0) as me:
        yield Workers(me)


if __name__ == "__main__":
    report(start)
