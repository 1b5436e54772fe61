"""Actors of Ray, each in a process of its own that imports torch, for `benchmarks.starts`."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from ._starts_work import report

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


class Workers:
    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors

    async def pids(self) -> Sequence[int]:
        return [*await asyncio.gather(*(each.pid.remote() for each in self.actors))]

    async def create(self, count: int) -> Any:
        actors = [self.actors[number % len(self.actors)] for number in range(count)]
        return await asyncio.gather(*(each.create.remote() for each in actors))


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
