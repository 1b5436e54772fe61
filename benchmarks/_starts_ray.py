"""Actors of Ray, each in a process of its own that imports torch, for `benchmarks.starts`."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from torch import Tensor

from ._starts_work import HOUR, report

ray: Any = import_module("ray")


class Counter:
    """An object that holds a number."""

    def __init__(self) -> None:
        self.value = 0


class Worker:
    """A worker: Ray's actor, which holds objects."""

    def __init__(self) -> None:
        import torch  # as every worker of ours has

        assert torch
        self.objects: list[Counter] = []

    def pid(self) -> int:
        return os.getpid()

    def create(self) -> None:
        self.objects.append(Counter())

    def take(self, x: Any) -> float:
        return float(x[0])

    def wait(self) -> None:
        time.sleep(HOUR)


class Workers:
    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors

    async def pids(self) -> Sequence[int]:
        return [*await asyncio.gather(*(each.pid.remote() for each in self.actors))]

    async def create(self, count: int) -> Any:
        actors = [self.actors[number % len(self.actors)] for number in range(count)]
        return await asyncio.gather(*(each.create.remote() for each in actors))

    async def take(self, x: Tensor) -> Any:
        kept = ray.put(x.numpy())  # once for all; Ray passes arrays without copies
        return await asyncio.gather(*(each.take.remote(kept) for each in self.actors))

    async def wait(self) -> Any:
        return await self.actors[-1].wait.remote()


@asynccontextmanager
async def start(size: int) -> AsyncIterator[Workers]:
    ray.init(num_cpus=size, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(num_cpus=0)(Worker)
        yield Workers([actor.remote() for _ in range(size)])
    finally:
        await asyncio.to_thread(ray.shutdown)


if __name__ == "__main__":
    report(start)
