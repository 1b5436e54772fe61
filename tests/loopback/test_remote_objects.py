"""Objects behind RRefs: calls on every kind of them, and how long one is held."""

import asyncio
import gc
import weakref

import pytest

from aiorpc_torch import RRef, create, remote
from tests.support.actors import Counter


class Slotted:
    """Cannot be held weakly."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[int] = []

    def push(self, item: int) -> None:
        self.items.append(item)

    async def total(self) -> int:
        return sum(self.items)


@pytest.mark.usefixtures("world")
async def test_calls_on_every_kind_of_object() -> None:
    """One, two and many calls, at once and in turn, on objects with and without weak references."""
    counter, numbers = await create("main", Counter), await create("main", Slotted)
    for expected in range(1, 6):
        assert await remote(counter).aadd() == expected
        await remote(numbers).push(expected)
    await asyncio.gather(*(remote(counter).aadd() for _ in range(50)))
    assert await remote(counter).add(0) == 55
    assert await remote(numbers).total() == 15


@pytest.mark.promise("calls.lifetime")
@pytest.mark.usefixtures("world")
async def test_calls_do_not_keep_objects_alive() -> None:
    """After many calls, dropping the RRef frees the object."""
    counter = Counter()
    alive, rref = weakref.ref(counter), RRef(counter)
    del counter
    for _ in range(5):
        await remote(rref).aadd()
    del rref
    for _ in range(1000):
        gc.collect()
        if alive() is None:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the object is still alive")
