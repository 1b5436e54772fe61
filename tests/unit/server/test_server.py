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
from tests.support.raw_connections import Tap
from tests.support.two_ends import SOON, TwoEnds, gated, two_ends, until


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
