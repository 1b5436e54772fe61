"""A wait for the next item that is cancelled: the stream has ended, and the next wait says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, RRef, call, create, remote, supervised
from aiorpc_torch.testing import Gate
from aiorpc_torch.training import Weights, follow
from aiorpc_torch.types import Worker

Iterate = Callable[[RRef[Any], Group[Any]], AsyncIterator[Any]]


class Gated:
    """A generator and a method that wait."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.has_closed = False

    async def items(self, *_: Any) -> AsyncIterator[int]:
        try:
            yield 1
            await self.gate.passed()
            yield 2
        finally:
            self.has_closed = True

    async def passed(self, *_: Any) -> None:
        await self.gate.passed()

    async def closed(self) -> bool:
        return self.has_closed


STREAMS: dict[str, Iterate] = {
    "a stream": lambda one, _: aiter(remote(one).items()),
    "with retries": lambda one, _: aiter(remote(one, retries=1).items()),
    "of any member": lambda _, group: aiter(remote(group.any()).items()),
    "by call": lambda one, _: aiter(call(one, Gated.items)),
}
RESULTS: dict[str, Iterate] = {
    "a map": lambda _, group: aiter(group.map(Gated.passed, range(3))),
    "results": lambda _, group: aiter(remote(group).passed()),
}


async def cancel_wait(items: AsyncIterator[Any]) -> None:
    waiting = asyncio.ensure_future(anext(items))
    while not waiting.done():
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,), timeout=0.01)
    assert waiting.cancelled()


async def check_cut_short(items: AsyncIterator[Any]) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a wait for its next item was cancelled, by"):
            await anext(items)
    await items.aclose()  # type: ignore[attr-defined]
    with pytest.raises(StopAsyncIteration):
        await anext(items)


@pytest.mark.promise("streams.cut_short")
@pytest.mark.parametrize("kind", STREAMS)
async def test_a_stream(world: Worker, kind: str) -> None:
    """It is closed at once, as an async generator is."""
    one = await create(world.name, Gated)
    items = STREAMS[kind](one, Group([one]))
    assert await anext(items) == 1
    await cancel_wait(items)
    while not await remote(one).closed():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await check_cut_short(items)


@pytest.mark.promise("streams.cut_short")
@pytest.mark.parametrize("kind", RESULTS)
async def test_results(world: Worker, kind: str) -> None:
    group = await create([world.name] * 2, Gated)
    items = RESULTS[kind](group[0], group)
    await cancel_wait(items)
    await check_cut_short(items)


@pytest.mark.promise("streams.cut_short")
async def test_a_stream_of_a_supervised_object(world: Worker) -> None:
    made = await supervised(world.name, Gated)
    items = aiter(remote(made).items())
    assert await anext(items) == 1
    await cancel_wait(items)
    await check_cut_short(items)


@pytest.mark.promise("streams.cut_short")
async def test_versions(world: Worker) -> None:
    """A wait for a version may be cancelled: later ones come all the same."""
    weights = Weights({"w": torch.zeros(1)})
    aiorpc.register("policy", weights)
    async with await follow("policy", on=world.name) as policy:
        versions = aiter(policy)
        await cancel_wait(versions)
        assert await weights.publish({"w": torch.ones(1)}) == 1
        assert await anext(versions) == 1
        async with contextlib.aclosing(versions):  # type: ignore[type-var]
            pass
        with pytest.raises(StopAsyncIteration):
            await anext(versions)
