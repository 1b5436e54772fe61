"""The ends of calls, as their callers see them."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from operator import add
from typing import Any

import pytest
import torch

from aiorpc_torch import WorkerLeft, call
from aiorpc_torch._server.calls import RpcCall
from tests.support.two_ends import TwoEnds, gated, gated_in_a_thread, two_ends, until


@pytest.fixture
async def ends(over_torch: None) -> AsyncIterator[TwoEnds]:
    """Without shared memory: large results are held until their callers collect them."""
    async with two_ends() as ends:
        yield ends


async def running(ends: TwoEnds, function: Any, value: Any) -> tuple[Any, RpcCall]:
    """A call that runs: its caller's task, and what the callee has of it."""
    task = asyncio.ensure_future(call("far", function, value))
    await ends.gate.wait_for()
    (found,) = ends.session.calls.values()
    return task, found


@pytest.mark.parametrize("function", [gated, gated_in_a_thread])
async def test_the_first_end_of_a_call_counts(ends: TwoEnds, function: Any) -> None:
    """A worker that leaves answers for a function that still runs; its result goes nowhere."""
    task, found = await running(ends, function, 1)
    found.abandon(WorkerLeft("it leaves"))
    with pytest.raises(WorkerLeft, match="it leaves"):
        await task
    ends.gate.open()
    found.succeed(2)
    found.fail(ValueError("late"))
    assert await call("far", add, 1, 2) == 3
    assert ends.connection.counters()["late"] == 0


@pytest.mark.parametrize("function", [gated, gated_in_a_thread])
async def test_a_large_result_of_a_cancelled_call_is_not_held(ends: TwoEnds, function: Any) -> None:
    """Nobody would collect it."""
    task, found = await running(ends, function, 0)
    session = ends.session
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: found.is_cancelled)
    found.succeed(torch.zeros(1_000_000))
    ends.gate.open()
    await until(lambda: not session.calls)
    assert session.held_bytes == 0
    assert not session.has_work()


class Observation:
    """The result of something that a call waits for."""


async def releases_what_it_has_awaited(_: int) -> bool:
    loop = asyncio.get_running_loop()
    future, result = loop.create_future(), Observation()
    loop.call_soon(future.set_result, result)
    known = weakref.ref(result)
    del result
    await future
    del future
    await asyncio.sleep(0)
    return known() is None


async def test_a_call_that_runs_on_keeps_no_result(ends: TwoEnds) -> None:
    """Not that of its first `await` either: it may be large, and the call may never end."""
    assert await call("far", releases_what_it_has_awaited, 1)
