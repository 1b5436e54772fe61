"""Consumers of remote generators, and the ways in which they stop."""

import asyncio
from typing import Any

import pytest

from aiorpc_torch import create, remote
from tests.support.actors import Streams

MEGABYTE = 1 << 18  # floats


ENDLESS = 1_000_000


async def streams(worker: str = "main") -> Any:
    """Generators of every kind, and counters of them."""
    return await create(worker, Streams)


async def closed(rref: Any) -> int:
    """Wait until a generator has ended; return how often one was cancelled."""
    async with asyncio.timeout(30.0):
        return await remote(rref).closed()


async def take(stream: Any, number: int) -> list[Any]:
    """Return the next items."""
    return [await anext(stream) for _ in range(number)]


async def by_break(stream: Any) -> None:
    async for _ in stream:
        break


async def by_dropping_it(stream: Any) -> None:
    iterator = aiter(stream)
    assert await anext(iterator) == 0
    del iterator


async def by_cancelling_the_task(stream: Any) -> None:
    begun = asyncio.Event()

    async def consume() -> None:
        async for _ in stream:
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(consume())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def iterate(stream: Any) -> list[Any]:
    return [item async for item in stream]
