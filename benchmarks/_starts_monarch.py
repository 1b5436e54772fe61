"""Actors of Monarch, each in a process of its own, for `benchmarks.starts`."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from torch import Tensor

from ._starts_work import HOUR, report

monarch: Any = import_module("monarch.actor")


class Counter:
    """An object that holds a number."""

    def __init__(self) -> None:
        self.value = 0


class Worker(monarch.Actor):  # type: ignore[misc]
    """A worker: Monarch's actor, which holds objects."""

    def __init__(self) -> None:
        import torch  # as every worker of ours has

        assert torch
        self.objects: list[Counter] = []

    @monarch.endpoint  # type: ignore[untyped-decorator]
    async def pid(self) -> int:
        return os.getpid()

    @monarch.endpoint  # type: ignore[untyped-decorator]
    async def create(self) -> None:
        self.objects.append(Counter())

    @monarch.endpoint  # type: ignore[untyped-decorator]
    async def take(self, x: Tensor) -> float:
        return float(x[0])

    @monarch.endpoint  # type: ignore[untyped-decorator]
    async def wait(self) -> None:
        await asyncio.sleep(HOUR)


class Workers:
    def __init__(self, actors: Any, size: int) -> None:
        self.actors = actors
        self.size = size

    async def pids(self) -> Sequence[int]:
        return [pid for _, pid in await self.actors.pid.call()]

    async def create(self, count: int) -> Any:
        each = [self.actors.slice(gpus=number) for number in range(self.size)]
        calls = (each[number % self.size].create.call_one() for number in range(count))
        return await asyncio.gather(*calls)

    async def take(self, x: Tensor) -> Any:
        return await self.actors.take.call(x)

    async def wait(self) -> Any:
        return await self.actors.slice(gpus=self.size - 1).wait.call_one()


@asynccontextmanager
async def start(size: int) -> AsyncIterator[Workers]:
    processes = monarch.this_host().spawn_procs(per_host={"gpus": size})
    try:
        yield Workers(processes.spawn("workers", Worker), size)
    finally:
        await processes.stop()


if __name__ == "__main__":
    report(start)
