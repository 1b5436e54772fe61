"""What the end of a world does to the queues of batches."""

import asyncio
import contextlib

import pytest

from aiorpc_torch import (
    NotInWorld,
    batched,
)
from aiorpc_torch.testing import world
from tests.unit.batching.test_queue import Gated, iterations, outcome


async def test_closing_fails_every_call() -> None:
    """Waiting and running calls get NotInWorld; the function is cancelled; new calls are served."""
    gated = Gated()
    async with world():
        calls = [asyncio.create_task(outcome(gated.pass_(n))) for n in range(5)]
        met = asyncio.create_task(outcome(gated.meet(1)))
        await gated.started.wait()
    got = await asyncio.gather(*calls, met)
    assert [type(each) for each in got] == [NotInWorld] * 6
    assert [each.may_have_run for each in got] == [True] * 3 + [False] * 3
    assert len({id(each) for each in got}) == 6
    assert "Gated.pass_" in str(got[0])
    assert "Gated.meet" in str(got[5])
    assert gated.batches == [[0, 1, 2]]
    gated.gate.set()
    assert await asyncio.wait_for(gated.pass_(7), 5.0) == ("passed", 7)


async def test_closing_does_not_wait_for_a_function_that_will_not_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A function that swallows its cancellation is left behind, with a warning that names it."""
    started, end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @batched(max_size=2)
    async def stubborn(items: list[int]) -> list[int]:
        started.set()
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()
        ended.set()
        return items

    async with asyncio.timeout(30.0), world():
        call = asyncio.ensure_future(stubborn(1))
        await started.wait()
    with pytest.raises(NotInWorld):
        await call
    assert "stubborn did not end" in caplog.text
    end.set()
    await ended.wait()
    await iterations()
