"""`paused` among processes: holders and objects that are killed, supervised objects, groups."""

import asyncio
import contextlib
import itertools
from typing import Any

import pytest

from aiorpc_torch import (
    Group,
    NotInWorld,
    RpcError,
    RRef,
    WorkerLost,
    call,
    create,
    paused,
    remote,
    supervised,
)
from aiorpc_torch.testing import kill, world

LONG = 60.0


class Counter:
    def __init__(self) -> None:
        self.count = 0

    async def add(self) -> int:
        self.count += 1
        return self.count


async def call_add(counter: Counter, _: int) -> int:
    return await counter.add()


class Holder:
    """Pauses objects for ever, in its own process."""

    async def pause(self, *rrefs: RRef[Any]) -> None:
        self.stack = paused(Group(rrefs))
        await self.stack.__aenter__()

    async def end(self) -> None:
        await self.stack.__aexit__(None, None, None)

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
    """The block goes on with the others, and is told at its end. A supervised object is made again
    and not paused."""
    async with world(["a", "b"], max_restarts=2), asyncio.timeout(LONG):
        counter = await create("a", Counter)
        made = await supervised("b", Counter)

        async def lose_one() -> None:
            async with paused(Group([counter, made])):
                assert await remote(made).add() == 1
                kill("b")
                assert await remote(made, retries=1).add() == 1
                assert await remote(counter).add() == 1

        with pytest.raises(WorkerLost):
            await lose_one()
        assert await remote(counter).add() == 2
        kill("b")
        with pytest.raises(WorkerLost):
            await remote(made).add()
        async with paused(made):  # it waits until it is there
            assert await remote(made).add() == 1


async def test_after_the_world_has_ended() -> None:
    """Pauses, and items of a map, do not raise what torch says."""
    async with asyncio.timeout(LONG):
        async with world(["a"]):
            counters = await create(["a"], Counter)
            results = counters.map(call_add, itertools.count(), return_exceptions=True)
            assert await anext(results) == 1
        found = list[Any]()
        with contextlib.suppress(RpcError):  # it may end, as its members have left
            found = [await anext(results) for _ in range(10)]
        assert all(isinstance(each, int | RpcError) for each in found), found
        await results.aclose()
        with pytest.raises(NotInWorld):
            async with paused(counters):
                raise AssertionError("it was entered")


@pytest.mark.promise("limits.paused")
async def test_an_object_whose_process_was_replaced() -> None:
    """It is not looked for in the next process of that name, also if that began meanwhile."""
    async with world(["a", "b"], max_restarts=1) as me, asyncio.timeout(LONG):
        holder = await create("a", Holder)
        counter, old = await create("a", Counter), await create("b", Counter)
        await remote(holder).pause(counter)

        async def pause() -> None:
            async with paused(Group([counter, old])):
                raise AssertionError("it was entered")

        pausing = asyncio.ensure_future(pause())
        await asyncio.sleep(0.1)  # it waits for the pause of the first object
        await me.restart("b")
        await remote(holder).end()
        with pytest.raises(WorkerLost, match="'b' is lost: it was restarted"):
            await pausing
        with pytest.raises(WorkerLost, match="'b' is lost: it was restarted"):
            async with paused(old):
                raise AssertionError("it was entered")
        assert await remote(counter).add() == 1


class Peer:
    """It calls another one while it runs."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        peers.append(self)

    async def ask(self, other: RRef[Any]) -> str:
        await self.goes_on.wait()
        return await remote(other).answer()  # type: ignore[no-any-return]

    async def answer(self) -> str:
        return "answer"


peers: list[Peer] = []


async def let_all() -> None:
    for each in peers:
        each.goes_on.set()


@pytest.mark.slow
@pytest.mark.promise("limits.paused")
@pytest.mark.parametrize("workers", [("a", "b"), ("b", "a"), ("a", "a")])
async def test_members_that_call_each_other(workers: tuple[str, str]) -> None:
    """What runs of one calls another one, which the holder has paused before."""
    async with world(["a", "b"]), asyncio.timeout(LONG):
        one, other = [await create(each, Peer) for each in workers]
        asking = asyncio.ensure_future(remote(one).ask(other))
        await asyncio.sleep(0)
        entered = asyncio.Event()

        async def pause() -> None:
            async with paused(Group([one, other])):
                entered.set()

        pausing = asyncio.ensure_future(pause())
        done, _ = await asyncio.wait([pausing], timeout=0.3)
        assert not done
        await call(workers[0], let_all)
        assert await asking == "answer"
        await pausing
        assert entered.is_set()


@pytest.mark.promise("limits.paused")
async def test_pauses_of_many_workers() -> None:
    """Each sees its own two calls in a row."""
    async with world(["a", "b", "c"]) as me, asyncio.timeout(LONG):
        counter = await create("a", Counter)
        holders = await create([each for each in me.peers if each != "a"], Holder)
        found = [await remote(holders).add(counter) for _ in range(5)]
        assert sorted(itertools.chain(*found)) == [*range(2, 22, 2)]
        assert await call(counter, Counter.add) == 21
