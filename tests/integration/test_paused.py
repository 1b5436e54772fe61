"""`paused` among processes: holders and objects that are killed, supervised objects, groups."""

import asyncio
import itertools
from typing import Any

import pytest

from aiorpc_torch import Group, RRef, call, create, paused, remote, supervised
from aiorpc_torch.testing import kill, world

LONG = 60.0


class Counter:
    def __init__(self) -> None:
        self.count = 0

    async def add(self) -> int:
        self.count += 1
        return self.count


class Holder:
    """Pauses objects for ever, in its own process."""

    async def pause(self, *rrefs: RRef[Any]) -> None:
        self.stack = paused(Group(rrefs))
        await self.stack.__aenter__()

    async def add(self, rref: RRef[Any]) -> int:
        async with paused(rref):
            await remote(rref).add()
            return await remote(rref).add()  # type: ignore[no-any-return]


@pytest.mark.promise("limits.paused")
async def test_a_holder_that_is_killed() -> None:
    """The calls that waited for it go on."""
    async with world(["a", "b", "holder"]), asyncio.timeout(LONG):
        counters = [await create(each, Counter) for each in ("a", "b")]
        holder = await create("holder", Holder)
        await remote(holder).pause(*counters)
        adding = [asyncio.ensure_future(remote(each).add()) for each in counters]
        done, _ = await asyncio.wait(adding, timeout=0.2)
        assert not done
        kill("holder")
        assert await asyncio.gather(*adding) == [1, 1]


@pytest.mark.promise("limits.paused")
async def test_a_worker_that_is_killed_while_its_object_is_paused() -> None:
    """The block goes on with the others; a supervised object is made again and not paused."""
    async with world(["a", "b"], max_restarts=1), asyncio.timeout(LONG):
        counter = await create("a", Counter)
        made = await supervised("b", Counter)
        async with paused(Group([counter, made])):
            assert await remote(made).add() == 1
            kill("b")
            assert await remote(made, retries=1).add() == 1
            assert await remote(counter).add() == 1
        assert await remote(counter).add() == 2


@pytest.mark.promise("limits.paused")
async def test_pauses_of_many_workers() -> None:
    """Each sees its own two calls in a row."""
    async with world(["a", "b", "c"]) as me, asyncio.timeout(LONG):
        counter = await create("a", Counter)
        holders = await create([each for each in me.peers if each != "a"], Holder)
        found = [await remote(holders).add(counter) for _ in range(5)]
        assert sorted(itertools.chain(*found)) == [*range(2, 22, 2)]
        assert await call(counter, Counter.add) == 21
