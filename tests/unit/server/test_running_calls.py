"""Calls that a server runs: counted, drained, and failed when its worker ends."""

import asyncio
from collections.abc import AsyncIterator
from operator import add
from typing import Any

import pytest

from aiorpc_torch import NotInWorld, WorkerLeft, WorkerLost, call
from aiorpc_torch.types import RemoteTraceback
from tests.support.two_ends import SOON, TwoEnds, gated, gated_in_a_thread, two_ends, until


@pytest.fixture
async def ends() -> AsyncIterator[TwoEnds]:
    async with two_ends() as ends:
        assert await call("far", add, 1, 2) == 3
        yield ends


async def test_the_calls_that_it_counts(ends: TwoEnds) -> None:
    """Those of connections that have ended too."""
    assert ends.server.sessions.tally() == (1, 0, 0)
    running = asyncio.ensure_future(call("far", gated, 1))
    await ends.gate.wait_for()
    assert ends.server.sessions.tally() == (2, 1, 0)
    (found,) = ends.server.open_calls()
    assert (found.name, found.caller) == ("gated", "near")
    ends.connection.abort()
    with pytest.raises(WorkerLost):
        await running
    await until(lambda: ends.server.sessions.tally() == (2, 0, 0))
    assert not ends.server.sessions


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("failure", ["", "its block raised ValueError: odd"])
async def test_a_worker_that_leaves_fails_what_runs(
    ends: TwoEnds, plain: bool, failure: str
) -> None:
    """At once, though a plain function runs on in its thread."""
    running = asyncio.ensure_future(call("far", gated_in_a_thread if plain else gated, 1))
    await ends.gate.wait_for()
    await ends.server.close(SOON, failure, failure)
    expected = WorkerLost if failure else WorkerLeft
    with pytest.raises(expected, match=failure or "has left its world") as raised:
        await running
    assert isinstance(raised.value, WorkerLost | WorkerLeft)
    assert raised.value.may_have_run
    assert raised.value.method in ("gated", "gated_in_a_thread")
    assert not isinstance(raised.value.__cause__, RemoteTraceback)  # no method has raised it
    assert ends.gate.cancelled == (not plain)
    assert not ends.server.sessions


async def test_calls_are_drained_before_it_leaves(ends: TwoEnds) -> None:
    """As long as any runs, within the limit."""
    running = asyncio.ensure_future(call("far", gated, 1))
    await ends.gate.wait_for()
    ends.server.retire()
    await ends.server.drain(0.0)
    draining = asyncio.ensure_future(ends.server.drain(SOON))
    await ends.session.retired.wait()
    assert not draining.done()
    ends.gate.open()
    assert await running == 1
    await draining


@pytest.mark.parametrize("function", [gated, gated_in_a_thread])
async def test_a_torch_client_runs_on_the_loop(ends: TwoEnds, function: Any) -> None:
    """It counts as a call that runs."""
    ends.gate.open()
    answer = ends.server.accept_torch(function, 5)
    assert len(ends.server.open_calls()) == 1
    await until(answer.done)
    assert answer.value() == 5
    await until(lambda: not ends.server.open_calls())


async def test_a_call_that_ends_as_its_worker_fails(ends: TwoEnds) -> None:
    """It is caused by what ended the worker's block, with the traceback, as later calls are."""
    running = asyncio.ensure_future(call("far", gated, 1))
    await ends.gate.wait_for()
    raised_there = "its block raised ValueError: odd"
    await ends.server.close(SOON, raised_there, f"{raised_there}\nTraceback of there")
    with pytest.raises(WorkerLost, match="its block raised ValueError: odd; gated may") as raised:
        await running
    later = await caught(call("far", gated, 2))
    for error in (raised.value, later):
        assert isinstance(error, WorkerLost)
        cause = error.__cause__
        assert isinstance(cause, WorkerLost)
        assert isinstance(cause.__cause__, RemoteTraceback)
        assert cause.__cause__.text == "Traceback of there"
    assert (raised.value.may_have_run, later.may_have_run) == (True, False)  # type: ignore[attr-defined]


async def caught(running: Any) -> BaseException | None:
    """Return what it raises."""
    try:
        await running
    except WorkerLost as exc:
        return exc
    return None


async def test_a_replaced_process_is_told(ends: TwoEnds) -> None:
    """Its calls are cancelled, and fail with the reason."""
    running = asyncio.ensure_future(call("far", gated, 1))
    await ends.gate.wait_for()
    ends.server.end_process(ends.far.members.peers["near"], "worker 'near' was restarted")
    with pytest.raises(NotInWorld, match="'near' was restarted") as raised:
        await running
    assert not isinstance(raised.value, WorkerLost)
    await until(lambda: ends.gate.cancelled)
