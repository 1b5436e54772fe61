"""What a node learns of another one: its failure, its end, and nothing of its names."""

import asyncio

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import NotInWorld, WorkerLeft, WorkerLost, call
from aiorpc_torch.types import Change, Worker
from tests.support.two_ends import gated, two_ends, until


async def test_a_node_has_names_and_counts_of_its_own() -> None:
    """Nothing of it is another node's."""
    async with two_ends() as ends:
        ends.far.server.names.add("ps", object())  # type: ignore[arg-type]
        assert ends.near.server.names.names() == ()
        assert await call("far", abs, -1) == 1
        assert (aiorpc.observe.stats().calls, aiorpc.observe.stats().served) == (1, 0)
        assert ends.far.server.sessions.tally() == (1, 0, 0)
        assert ends.far.pool.counters() == {}
    assert ends.far.server.names.names() == ()  # it has left


async def test_a_callee_that_fails() -> None:
    """It is lost when its calls raise, so `wait_for` then waits; its last frame is no life."""
    async with two_ends() as ends:
        running = asyncio.ensure_future(call("far", gated, 1))
        await ends.gate.wait_for()
        connection = ends.connection
        ends.session.close("failed", "odd\nTraceback")
        with pytest.raises(WorkerLost, match="odd"):
            await running
        assert ends.near.members.lost().keys() == {"far"}
        await connection.ended.wait()
        assert ends.near.members.lost().keys() == {"far"}


async def test_a_caller_that_fails() -> None:
    """It stays lost: its last frame is no sign of life."""
    async with two_ends() as ends:
        assert await call("far", abs, -1) == 1
        session = ends.session
        ends.connection.leave("failed", "odd\nTraceback", NotInWorld("it has failed"))
        await until(lambda: ends.far.members.lost())
        await session.ended.wait()
        await asyncio.sleep(0)
        assert ends.far.members.lost().keys() == {"near"}


@pytest.mark.promise("rejoin.changes")
async def test_changes_are_told_to_every_reader() -> None:
    """Of a slow one none is missed; the iteration ends when the worker leaves."""
    async with two_ends() as ends:
        me, found = Worker._of(ends.near), list[Change]()
        slow = me.changes()
        first = asyncio.ensure_future(anext(slow))

        async def follow() -> None:
            async for change in me.changes():
                found.append(change)

        def follow_elsewhere() -> None:
            asyncio.run(follow())

        reading = [asyncio.create_task(follow()), asyncio.create_task(follow())]
        await asyncio.sleep(0)
        elsewhere = asyncio.create_task(asyncio.to_thread(follow_elsewhere))
        ends.near.membership.lose("far", WorkerLost("far", "for this test"))
        ends.near.membership.lose("far", WorkerLost("far", "once more"))
        ends.near.membership.on_message(ends.near.members.peers["far"])
        await until(lambda: not ends.near.members.lost())
        ends.near.membership.on_leave_message("far", 1, "left", "")
        ends.near.membership.lose("far", WorkerLost("far", "its connection has ended"))
        changes = [
            Change("lost", "far", 1, "for this test"),
            Change("returned", "far", 1),
            Change("left", "far", 1),
        ]
        assert await first == changes[0]
        await until(lambda: len(found) >= 2 * len(changes))
        ends.near.end_changes()
        await asyncio.gather(*reading, elsewhere)
        assert [each async for each in slow] == changes[1:]
        assert [found.count(each) >= 2 for each in changes] == [True] * len(changes)


async def test_a_peer_that_failed_is_lost_and_has_not_left() -> None:
    """Its own report is the reason."""
    async with two_ends() as ends:
        reading = asyncio.ensure_future(anext(Worker._of(ends.near).changes()))
        await asyncio.sleep(0)
        ends.near.membership.on_leave_message("far", 1, "failed", "its block raised\nTraceback")
        assert await reading == Change("lost", "far", 1, "its block raised")


async def test_a_wait_for_a_worker_that_has_left_ends() -> None:
    """Also one that was lost before, and one of a worker whose connections end later."""
    async with two_ends() as ends:
        membership, me = ends.near.membership, Worker._of(ends.near)
        membership.lose("far", WorkerLost("far", "for this test"))
        waiting = asyncio.ensure_future(me.wait_for("far"))
        await asyncio.sleep(0)
        membership.on_leave_message("far", 1, "left", "")
        with pytest.raises(WorkerLeft, match="worker 'far' has left its world"):
            await waiting
        membership.lose("far", WorkerLost("far", "its connection has ended"))
        with pytest.raises(WorkerLeft, match="worker 'far' has left its world"):
            await me.wait_for("far")
