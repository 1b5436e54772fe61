"""A server whose callers are nodes of this process."""

import asyncio
from collections.abc import AsyncIterator
from operator import add
from typing import Any

import pytest
from torch.futures import Future

from aiorpc_torch import NotInWorld, RemoteError, Round, WorkerLeft, WorkerLost, batched, call
from aiorpc_torch._batching import queue
from aiorpc_torch._peers.peers import replaced_text
from aiorpc_torch._wire.exceptions import RemoteFailure
from aiorpc_torch._wire.frames import CALLS, frame
from aiorpc_torch._wire.plain import dump
from aiorpc_torch.types import RemoteTraceback
from tests.support.raw_connections import Tap
from tests.support.two_ends import SOON, TwoEnds, gated, gated_in_a_thread, two_ends, until


@pytest.fixture
async def ends() -> AsyncIterator[TwoEnds]:
    async with two_ends() as ends:
        assert await call("far", add, 1, 2) == 3
        yield ends


def introduction(ends: TwoEnds, *caller: Any) -> Any:
    """The answer to a caller that asks for an introduction."""
    reply: Future[Any] = Future()
    ends.server.introduce(dump(caller), reply)
    return reply.value()


async def test_the_calls_that_it_counts(ends: TwoEnds) -> None:
    """Those of connections that have ended too."""
    assert ends.server.tally() == (1, 0, 0)
    running = asyncio.ensure_future(call("far", gated, 1))
    await ends.gate.wait_for()
    assert ends.server.tally() == (2, 1, 0)
    ((method, caller, _),) = ends.server.running_calls(None)
    assert (method, caller) == ("gated", "near")
    ends.connection.abort()
    with pytest.raises(WorkerLost):
        await running
    await until(lambda: ends.server.tally() == (2, 0, 0))
    assert not ends.server.sessions


@pytest.mark.parametrize("alone", [True, False])
async def test_a_number_that_comes_twice(
    ends: TwoEnds, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """The connection is closed: results could not be told apart."""
    tap = Tap(monkeypatch)
    running = [asyncio.ensure_future(call("far", gated, 1)) for _ in range(1 if alone else 2)]
    await ends.gate.wait_for(len(running))
    kind, data = next(each[1:] for each in tap.frames if each[1] == CALLS)
    ends.connection.write(frame(kind, data))
    for each in running:
        with pytest.raises(RemoteError, match="already running"):
            await each
    await until(lambda: ends.gate.cancelled == len(running))


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


@batched(Round(2))
def contribute(values: list[int]) -> list[int]:
    return values


@pytest.mark.parametrize("failure", ["", "its block raised ValueError: odd"])
async def test_what_has_run_of_what_it_refuses(ends: TwoEnds, failure: str) -> None:
    """Not a call that needs an introduction first; but the call whose result it has held."""
    key = ends.session.key
    await ends.server.close(SOON, failure, failure)
    late: Any = ends.server.collect(dump((key, 1)))
    for answer, may_have_run in ((introduction(ends, "near", 0), False), (late.value(), True)):
        assert isinstance(answer, RemoteFailure)
        with pytest.raises((WorkerLost, WorkerLeft)) as raised:
            answer.raise_()
        assert isinstance(raised.value, WorkerLost | WorkerLeft)
        assert raised.value.may_have_run is may_have_run


async def test_a_call_that_waits_for_a_batch_as_the_worker_leaves(ends: TwoEnds) -> None:
    """It may have come after the queues were closed: it leaves its queue."""

    def waiting() -> int:
        return sum(map(len, queue._queues.owners()))

    before = waiting()
    running = asyncio.ensure_future(call("far", contribute, 1))
    await until(lambda: waiting() == before + 1)
    closing = asyncio.ensure_future(ends.server.close(SOON))
    with pytest.raises(WorkerLeft):
        await running
    assert waiting() == before
    await closing


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


async def test_who_is_introduced(ends: TwoEnds) -> None:
    """Members, each process with its own credentials, until this worker leaves."""
    ends.server.open()
    try:
        found = introduction(ends, "near", 0)
        assert not isinstance(found, RemoteFailure)
        assert introduction(ends, "near", 0) == found != introduction(ends, "far", 1)
        with pytest.raises(RemoteError, match="no worker 'stranger' in this world"):
            introduction(ends, "stranger", 0).raise_()
        with pytest.raises(NotInWorld, match="a newer process has replaced this one"):
            introduction(ends, "near", 7).raise_()
        ends.server.end_process(ends.far.members.peers["near"], replaced_text("near"))
        assert introduction(ends, "near", 0) != found
        ends.server.retire()
        with pytest.raises(WorkerLeft, match="'far' has left its world"):
            introduction(ends, "near", 0).raise_()
    finally:
        await ends.server.close(SOON)


async def test_a_replaced_process_is_told(ends: TwoEnds) -> None:
    """Its calls are cancelled, and fail with the reason."""
    running = asyncio.ensure_future(call("far", gated, 1))
    await ends.gate.wait_for()
    ends.server.end_process(ends.far.members.peers["near"], replaced_text("near"))
    with pytest.raises(NotInWorld, match="'near' was restarted") as raised:
        await running
    assert not isinstance(raised.value, WorkerLost)
    await until(lambda: ends.gate.cancelled)


@pytest.mark.parametrize("function", [gated, gated_in_a_thread])
async def test_a_torch_client_runs_on_the_loop(ends: TwoEnds, function: Any) -> None:
    """It counts as a call that runs."""
    ends.gate.open()
    answer = ends.server.accept_torch(function, 5)
    assert len(ends.server.running_calls(None)) == 1
    await until(answer.done)
    assert answer.value() == 5
    await until(lambda: not ends.server.running_calls(None))


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
