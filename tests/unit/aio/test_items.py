"""Iterators with the manners of an async generator."""

import asyncio
from collections.abc import Awaitable

import anyio
import pytest

from aiorpc_torch._aio.items import ItemIterator


class Items(ItemIterator[int]):
    """Items of a queue; an exception in it is raised."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: asyncio.Queue[int | BaseException] = asyncio.Queue()
        self.stops = 0

    def _next(self) -> Awaitable[int]:
        return self._found()

    async def _found(self) -> int:
        item = await self.queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def _stop(self) -> None:
        self.stops += 1


async def wait(items: Items) -> int:
    return await anext(items)


async def waiting(items: Items) -> "asyncio.Task[int]":
    task = asyncio.create_task(wait(items))
    await asyncio.sleep(0)
    return task


async def test_one_task_waits() -> None:
    """Another one is refused, and the first gets its item."""
    items = Items()
    task = await waiting(items)
    with pytest.raises(RuntimeError, match="another task waits for the next item of this stream"):
        await anext(items)
    items.queue.put_nowait(1)
    assert (await task, items.stops) == (1, 0)


@pytest.mark.parametrize("end", [StopAsyncIteration(), ValueError()], ids=["end", "failure"])
async def test_an_exception_ends_it(end: Exception) -> None:
    items = Items()
    items.queue.put_nowait(end)
    with pytest.raises(type(end)):
        await anext(items)
    assert items.stops == 1
    with pytest.raises(StopAsyncIteration):
        await anext(items)


async def test_a_cancelled_wait_ends_it_until_it_is_closed() -> None:
    items = Items()
    task = await waiting(items)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a wait for its next item was cancelled"):
            await anext(items)
    await items.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(items)


async def test_a_scope_reports_its_deadline_before_the_error_of_the_call() -> None:
    items = Items()
    items._bound = 0.0
    items.queue.put_nowait(ValueError())
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_soon(scope.cancel)
        await anext(items)
    assert scope.cancelled_caught
