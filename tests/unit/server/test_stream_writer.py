"""Generators that run as far as their callers' credit goes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from aiorpc_torch import call
from aiorpc_torch._server.stream_writer import (
    StreamCall,
    pump_in_thread,
)
from aiorpc_torch._wire.connection_state import INITIAL_CREDIT
from tests.support.two_ends import TwoEnds, two_ends, until

UNKNOWN = 1 << 40  # no call of the caller has that number: it drops the items


@pytest.fixture
async def ends() -> AsyncIterator[TwoEnds]:
    async with two_ends() as ends:
        assert await call("far", abs, -1) == 1
        yield ends


class Source:
    """A generator that counts its items, and knows when it is closed."""

    def __init__(self) -> None:
        self.items = 0
        self.is_closed = False

    def plain(self, most: int = 1 << 30) -> Iterator[int]:
        try:
            while self.items < most:
                self.items += 1
                yield self.items
        finally:
            self.is_closed = True

    async def coroutine(self) -> AsyncIterator[int]:
        with contextlib.closing(self.plain()) as items:
            for item in items:
                yield item


def stream(ends: TwoEnds) -> StreamCall:
    return StreamCall(ends.session, None, UNKNOWN, 0.0, print, ((), {}), True)


async def test_an_async_generator_waits_for_credit(ends: TwoEnds) -> None:
    """Each item costs some; it is closed with its call."""
    found, source = stream(ends), Source()
    pumping = asyncio.ensure_future(found.pump(source.coroutine()))
    await until(lambda: source.items == INITIAL_CREDIT)
    for _ in range(10):
        await asyncio.sleep(0)
    assert source.items == INITIAL_CREDIT
    found.grant(5)
    await until(lambda: source.items == INITIAL_CREDIT + 5)
    pumping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pumping
    assert source.is_closed


async def test_a_plain_generator_gives_its_thread_back(ends: TwoEnds) -> None:
    """It goes on when there is credit again, in any thread, once for all grants meanwhile."""
    found, source, tasks = stream(ends), Source(), list[Callable[[], None]]()
    pump_in_thread(found, source.plain(INITIAL_CREDIT + 7), tasks.append)
    assert (source.items, tasks) == (INITIAL_CREDIT, [])
    found.grant(5)
    found.grant(1)
    (rest,) = tasks
    await asyncio.to_thread(rest)
    assert (source.items, len(tasks)) == (INITIAL_CREDIT + 6, 1)
    found.grant(5)
    tasks[1]()
    assert source.is_closed
    assert UNKNOWN not in ends.session.calls


async def test_a_plain_generator_that_waits_is_closed_when_it_is_cancelled(ends: TwoEnds) -> None:
    """In a thread again: closing it runs code of the user."""
    found, source, tasks = stream(ends), Source(), list[Callable[[], None]]()
    pump_in_thread(found, source.plain(), tasks.append)
    found.cancel()
    assert not source.is_closed
    assert UNKNOWN not in ends.session.calls
    (rest,) = tasks
    rest()
    assert source.is_closed
    found.grant(1)
    assert len(tasks) == 1


async def test_a_large_item_costs_more(ends: TwoEnds) -> None:
    """So a slow consumer does not fill its memory."""
    found = stream(ends)
    assert found.send("small")
    assert not found.send(bytes(INITIAL_CREDIT * 64 * 1024))
    resumed: list[str] = []
    assert found.call_when_credit(lambda: resumed.append("resumed"))
    found.grant(1)
    assert resumed == ["resumed"]  # and looks itself whether the credit is enough
