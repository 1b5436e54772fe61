"""Workers that pass on RRefs of each other's objects, in processes that were in no other world."""

import asyncio
import gc
import sys
import threading
from collections.abc import Sequence
from typing import Any

from aiorpc_torch import RRef, WorkerLost, call, create, local_world, remote
from aiorpc_torch._torch import rrefs
from aiorpc_torch.testing import frozen, kill

from .actors import Counter, Holder, Slotted

SOON = 60.0
ABORT = 12.0  # seconds in which torch asks five times, and aborts the process then


class Ending:
    """An object that notes its end."""

    ended = 0

    def close(self) -> None:
        type(self).ended += 1

    async def is_same(self, rref: Any) -> bool:
        return rref.is_owner() and rref.local_value() is self


async def ended() -> int:
    return Ending.ended


async def lent() -> int:
    gc.collect()
    return len(rrefs._table.lent)


async def until_lent(most: int, workers: Sequence[str]) -> None:
    """Wait until each of these workers has lent so many RRefs at most."""
    async with asyncio.timeout(SOON):
        while max([await call(each, lent) for each in workers]) > most:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def lives_as_long_as_what_was_borrowed() -> None:
    async with local_world(["a", "b"]):
        rref, holder = await create("a", Ending), await create("b", Holder)
        await remote(holder).take(rref)
        assert await call("main", lent) == 1
        assert await remote(rref).is_same(rref)  # its owner borrows, too
        del rref
        found = await remote(holder).given()
        assert await remote(found).is_same(found)
        del found
        await until_lent(0, "b")
        assert await call("a", ended) == 0
        await remote(holder).take(None)
        await until_lent(0, ["main", "a", "b"])
        async with asyncio.timeout(SOON):
            while not await call("a", ended):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def is_not_sent() -> None:
    """A value that cannot be pickled, after RRefs of this worker's objects and of another one's."""
    async with local_world(["a", "b"]):
        holder = await create("b", Holder)
        for kind in (Ending, Slotted):
            own, others = kind(), await create("a", kind)
            unused = sys.getrefcount(own)
            for given in (RRef(own), others):
                try:
                    await remote(holder).take([given, threading.Lock()])
                except TypeError:
                    del given
                else:
                    raise AssertionError("a lock was sent")
            assert await lent() == 0
            assert sys.getrefcount(own) == unused


async def goes_from_hand_to_hand() -> None:
    """Each worker lends one at most, however often it comes again."""
    async with local_world(["a", "b", "c"]):
        holders = [await create(each, Holder) for each in "bc"]
        for kind in (Counter, Slotted):
            rref = await create("a", kind)
            for number in range(1, 6):
                await remote(holders[0]).take(rref)
                await remote(holders[1]).take_from(holders[0])
                rref = await remote(holders[1]).given()
                assert await remote(holders[1]).add(1) == number
            await until_lent(1, ["main", "b", "c"])
            for each in holders:
                await remote(each).take(None)
            del rref
            await until_lent(0, ["main", "a", "b", "c"])


async def outlives_the_lender() -> None:
    async with local_world(["a", "b", "c"]):
        holder, last = await create("b", Holder), await create("c", Holder)
        await remote(holder).take(await create("a", Counter))
        await remote(last).take_from(holder)
        kill("b")
        assert [await remote(last).add(1), await remote(last).add(1)] == [1, 2]


async def dies(name: str) -> None:
    """The owner dies before torch of the receiver could ask it, or the lender before it is told."""
    async with local_world(["owner", "lender", "receiver"]):
        rref, holder = await create("owner", Counter), await create("lender", Holder)
        last = await create("receiver", Holder)
        await remote(holder).take(rref)
        with frozen("owner"):
            await remote(last).take_from(holder)
            kill(name)
        try:
            await call(name, ended)
        except WorkerLost:
            await asyncio.sleep(ABORT)  # what is tested
            await remote(last).take(None)
            await call("receiver", ended)
        else:
            raise AssertionError(f"{name} lives")
