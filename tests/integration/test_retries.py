"""`remote(ref, retries=n)`: calls that are made again when their worker is gone."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    CallTimeout,
    Group,
    GroupError,
    WorkerLost,
    call,
    create,
    remote,
    supervised,
)
from aiorpc_torch.testing import drop_connection, frozen, kill, world

LONG = 60.0


class Mortal:
    """Ends its process at a call, as often as there are lives in a file."""

    def __init__(self, lives: Path) -> None:
        self.lives = lives

    async def add(self, x: int) -> int:
        self._die()
        return x + 1

    async def items(self, x: int) -> AsyncIterator[int]:
        self._die()
        for item in range(3):
            yield x + item

    async def endless(self, x: int) -> AsyncIterator[int]:
        for item in range(2):
            yield x + item
        await asyncio.Event().wait()

    async def lose(self, worker: str) -> None:
        raise WorkerLost(worker)

    def _die(self) -> None:
        with self.lives.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two workers may die at once
            left = int(file.read())
            if left:
                file.seek(0)
                file.write(str(left - 1))
                file.flush()
                os._exit(9)


async def slow_again(lives: Path) -> Mortal:
    """Make a Mortal; wait for ever if one has died."""
    if await asyncio.to_thread(lives.read_text) == "0":
        await asyncio.Event().wait()
    return Mortal(lives)


@pytest.fixture
def lives(tmp_path: Path) -> Any:
    def write(count: int, name: str = "lives") -> Path:
        path = tmp_path / name
        path.write_text(str(count))
        return path

    return write


@pytest.mark.slow
@pytest.mark.promise("calls.retries")
async def test_a_supervised_object(lives: Any) -> None:
    """A call that may have run waits for the next incarnation, up to so often."""
    async with world(["a"], max_restarts=9), asyncio.timeout(LONG):
        made = await supervised("a", Mortal, lives(2))
        assert await remote(made, retries=2).add(1) == 2
        assert made.incarnation == 2
        lives(3)
        with pytest.raises(WorkerLost) as raised:
            await remote(made, retries=2).add(1)
        assert raised.value.may_have_run
        assert await remote(made, retries=2).add(1) == 2
        lives(1)
        assert await call(remote(made, retries=1), Mortal.add, 1) == 2
        lives(1)
        with pytest.raises(WorkerLost):
            await remote(made).add(1)


@pytest.mark.promise("calls.retries")
async def test_streams_until_their_first_item(lives: Any) -> None:
    """A stream that has given an item is not begun again."""
    async with world(["a"], max_restarts=9), asyncio.timeout(LONG):
        made = await supervised("a", Mortal, lives(1))
        assert [item async for item in remote(made, retries=1).items(5)] == [5, 6, 7]
        assert made.incarnation == 1
        stream = aiter(remote(made, retries=5).endless(5))
        assert [await anext(stream), await anext(stream)] == [5, 6]
        kill("a")
        with pytest.raises(WorkerLost):
            await anext(stream)


@pytest.mark.promise("calls.retries")
async def test_any_member(lives: Any) -> None:
    """Another one gets the call."""
    async with world(["a", "b", "c"]), asyncio.timeout(LONG):
        group = await create(["a", "b", "c"], Mortal, lives(2))
        anyone = remote(group.any(), retries=2)
        assert await asyncio.gather(*(anyone.add(x) for x in range(20))) == [*range(1, 21)]
        lives(1)
        with pytest.raises(WorkerLost):
            await remote(group.any(), retries=2).add(1)


@pytest.mark.promise("calls.retries")
async def test_members_of_a_group(lives: Any) -> None:
    """Each on its own: supervised ones once they are there again; a dead RRef stays dead."""
    async with world(["a", "b"], max_restarts=9), asyncio.timeout(LONG):
        group = await supervised(["a", "b"], Mortal, lives(2))
        assert await remote(group, retries=2).add(1) == [2, 2]
        plain = Group([each.rref for each in group])  # type: ignore[attr-defined]
        lives(1)
        with pytest.raises(GroupError) as raised:
            await remote(plain, retries=3).add(1)
        assert sorted(type(each).__name__ for each in raised.value.results) == ["WorkerLost", "int"]


async def test_an_rref_of_a_dead_worker_fails_at_once(lives: Any) -> None:
    """Its object is gone: nothing is waited for."""
    async with world(["a"]), asyncio.timeout(LONG):
        rref = await create("a", Mortal, lives(1))
        with pytest.raises(WorkerLost) as raised:
            await remote(rref, retries=5).add(1)
        assert raised.value.may_have_run, "the first attempt; the last was not sent"
        assert "an earlier attempt of this call may have run" in raised.value.__notes__
        with pytest.raises(WorkerLost):
            await remote(rref, retries=5).add(1)


@pytest.mark.promise("calls.retries")
async def test_an_error_tells_of_all_attempts(lives: Any) -> None:
    """Whatever ends the last attempt: `may_have_run` is True if an earlier one may have."""
    async with world(["a", "b"]), asyncio.timeout(LONG):
        group = await create(["a", "b"], Mortal, lives(2))
        with pytest.raises(WorkerLost, match="no member of the group is left") as lost:
            await remote(group.any(), retries=5).add(1)
        assert lost.value.may_have_run
        with pytest.raises(WorkerLost) as lost:
            await remote(group.any(), retries=5).add(1)
        assert not lost.value.may_have_run
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        made = await supervised("a", slow_again, lives(1))
        with pytest.raises(
            CallTimeout, match=r"that worker was awaited for .*me\.restart\('a'\)"
        ) as late:
            await remote(made, retries=2, timeout=1.5).add(1)
        assert late.value.may_have_run
    async with world(["a", "b"]), asyncio.timeout(LONG):
        group = Group(
            [await create("a", Mortal, lives(1)), await create("b", Mortal, lives(0, "others"))]
        )
        with pytest.raises(GroupError) as failed:
            await remote(group, retries=1).add(1)
        [member] = failed.value.exceptions
        assert isinstance(member, WorkerLost)
        assert member.may_have_run


@pytest.mark.promise("calls.retries")
async def test_a_worker_that_was_silent(lives: Any) -> None:
    """The call is made again, and waits for the worker within its timeout."""
    async with world(["a"], heartbeat=1.0), asyncio.timeout(LONG):
        rref = await create("a", Mortal, lives(0))
        with frozen("a"):
            adding = asyncio.create_task(remote(rref, retries=20).add(1))
            with pytest.raises(CallTimeout):
                await remote(rref, timeout=2.2, retries=20).add(1)
            await asyncio.wait([adding], timeout=0.3)
            assert not adding.done()
        assert await adding == 2


@pytest.mark.promise("calls.retries")
@pytest.mark.parametrize("bounded", [False, True])
async def test_a_worker_that_stops_as_its_connection_ends(lives: Any, bounded: bool) -> None:
    """The heartbeat bounds the wait for it, although no connection is left to be silent."""
    async with world(["a"], heartbeat=1.0), asyncio.timeout(LONG):
        rref = await create("a", Mortal, lives(0))
        with frozen("a"):
            limit = 0.3 if bounded else None
            calls = [asyncio.ensure_future(remote(rref, retries=1, timeout=limit).add(1))]
            await asyncio.sleep(0)
            drop_connection("a")
            (told,) = await asyncio.gather(*calls, return_exceptions=True)
            assert type(told) is (CallTimeout if bounded else WorkerLost)


async def test_what_a_method_has_lost_is_its_own_affair(lives: Any) -> None:
    """An exception of the method is not repeated, whatever its class."""
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        made = await supervised("a", Mortal, lives(0))
        for worker in ("a", "elsewhere"):
            with pytest.raises(WorkerLost, match=worker):
                await remote(made, retries=3).lose(worker)
        assert made.incarnation == 0


async def test_a_call_that_is_cancelled_while_it_waits(lives: Any) -> None:
    """Nothing is left of it."""
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        made = await supervised("a", Mortal, lives(0))
        kill("a")
        with pytest.raises(TimeoutError), aiorpc.timeout(0.0):
            await remote(made, retries=3).add(1)
        adding = asyncio.create_task(remote(made, retries=3).add(1))
        await asyncio.sleep(0)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert await remote(made, retries=3).add(1) == 2
        assert aiorpc.observe.stats().in_flight == 0
