"""The callee's end of a connection; the caller's is a real one."""

import asyncio
from collections.abc import AsyncIterator
from operator import add

import pytest

from aiorpc_torch import WorkerLeft, WorkerLost, call
from tests.support.raw_connections import Tap
from tests.support.two_ends import SOON, TwoEnds, gated, two_ends, until


@pytest.fixture
async def ends() -> AsyncIterator[TwoEnds]:
    async with two_ends() as ends:
        assert await call("far", add, 1, 2) == 3
        yield ends


async def test_results_of_one_iteration_share_a_frame(
    ends: TwoEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = Tap(monkeypatch)
    calls = asyncio.gather(*(call("far", gated, number) for number in range(5)))
    await ends.gate.wait_for(5)
    ends.gate.open()
    async with asyncio.timeout(SOON):
        assert await calls == [0, 1, 2, 3, 4]
    assert tap.count("results") == 1
    assert not ends.session.has_work()


async def test_the_calls_of_a_connection_that_ends_are_cancelled(ends: TwoEnds) -> None:
    """Their caller, if it lives, learns that they may have run."""
    running, session = asyncio.ensure_future(call("far", gated, 1)), ends.session
    await ends.gate.wait_for()
    ends.connection.abort()
    with pytest.raises(WorkerLost) as lost:
        await running
    assert lost.value.may_have_run
    await until(lambda: ends.gate.cancelled)
    assert session.ended.is_set()
    assert not ends.server.sessions
    assert not session.calls


@pytest.mark.promise("joining.retire")
async def test_a_retired_caller_sends_no_further_call(ends: TwoEnds) -> None:
    """What runs is answered; the next call is not sent, and the worker is none of the living."""
    running, session = asyncio.ensure_future(call("far", gated, 1)), ends.session
    await ends.gate.wait_for()
    session.retire()
    async with asyncio.timeout(SOON):
        await session.retired.wait()
    assert (ends.near.pool.load("far"), ends.near.members.present()) == (None, ())
    with pytest.raises(WorkerLeft, match="'far' has left its world") as raised:
        await call("far", add, 1, 2)
    assert not raised.value.may_have_run
    assert len(ends.server.sessions) == 1
    ends.gate.open()
    assert await running == 1


async def test_reading_pauses_while_the_caller_does_not_read(ends: TwoEnds) -> None:
    """It takes no further calls whose results would fill its memory."""
    ends.session.pause_writing()
    late = asyncio.ensure_future(call("far", add, 1, 2))
    for _ in range(100):
        await asyncio.sleep(0)
    assert ends.session.dispatcher.served == 1
    ends.session.resume_writing()
    async with asyncio.timeout(SOON):
        assert await late == 3


async def test_a_ping_is_heard(ends: TwoEnds) -> None:
    """A sign of life of the caller is recorded at its callee, and of the callee at its caller."""
    caller, callee = ends.far.members.peers["near"], ends.near.members.peers["far"]
    caller.last_heard = callee.last_heard = 0.0
    ends.session.ping()
    await until(lambda: caller.last_heard and callee.last_heard)
