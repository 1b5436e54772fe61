"""Waits for what runs on another event loop."""

import asyncio
from contextlib import closing

import pytest

from aiorpc_torch import NotInWorld
from aiorpc_torch._aio.loops import await_on
from tests.support.slack import SLACK


async def test_a_loop_that_is_closed_before_the_first_step() -> None:
    """The wait ends, and the coroutine is closed."""

    async def never() -> None:
        raise AssertionError

    with closing(asyncio.new_event_loop()) as loop:
        coroutine = never()
        waiting = asyncio.create_task(await_on(loop, coroutine))
        await asyncio.sleep(0)
    async with asyncio.timeout(SLACK):
        with pytest.raises(NotInWorld, match="the event loop of this worker has ended"):
            await waiting
    with pytest.raises(RuntimeError, match="cannot reuse"):
        coroutine.send(None)


async def test_a_wait_that_is_cancelled() -> None:
    """So is what it waits for."""
    cancelled = asyncio.Event()
    begun = asyncio.Event()
    here = asyncio.get_running_loop()

    async def run() -> None:
        here.call_soon_threadsafe(begun.set)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            here.call_soon_threadsafe(cancelled.set)
            raise

    def waits() -> None:
        async def wait() -> None:
            waiting = asyncio.create_task(await_on(here, run()))
            await await_on(here, begun.wait())
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(wait())

    async with asyncio.timeout(SLACK):
        await asyncio.to_thread(waits)
        await cancelled.wait()
