"""Counters that change while they are read, and reprs of private objects."""

import asyncio
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from aiorpc_torch import RRef, call, remote
from aiorpc_torch._batching.policies import Fill
from aiorpc_torch._batching.stats import new_counters
from aiorpc_torch._client import pool
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch.observe import Stats, stats
from aiorpc_torch.testing import Gate
from tests.support import actors

pytestmark = pytest.mark.usefixtures("world")


class Waiting:
    """A queue, to be counted."""

    def __len__(self) -> int:
        return 1


def count_function(kept: list[Any]) -> None:
    kept.append(new_counters("test_stats_and_warnings.unused", Fill(2)))


def count_queue(kept: list[Any]) -> None:
    if not kept:
        kept.append(new_counters("test_stats_and_warnings.waits", Fill(2)))
    kept.append(Waiting())
    kept[0].queues.set(kept[-1], None)


numbers = itertools.count()


def count_reason(kept: list[Any]) -> None:
    while len(kept) < 3:
        kept.append(new_counters("test_stats_and_warnings.counted", Fill(2)))
    for counters in kept:
        counters.count_batch(f"reason {next(numbers)}", [1.0])


def count_loop(kept: list[Any]) -> None:
    connections = pool.current()
    kept.append(asyncio.AbstractEventLoop())
    connections._by_loop[id(kept[-1])] = weakref.ref(kept[-1]), {}


@pytest.mark.promise("worlds.stats")
@pytest.mark.parametrize("count", [count_function, count_queue, count_reason, count_loop])
async def test_stats_in_any_thread(count: Callable[[list[Any]], None]) -> None:
    """Functions, queues, reasons and loops that call may come and go between any two lines."""
    kept: list[Any] = []
    steps = 0

    def come_and_go(*_: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 500 and steps % 50:  # other tests may have left thousands to count
            return come_and_go
        count(kept)
        if len(kept) > 10:
            del kept[3:5]
        return come_and_go

    def look() -> Stats:
        for _ in range(10):
            count(kept)
        sys.settrace(come_and_go)  # called before each line; another thread might run there
        try:
            return stats()
        finally:
            sys.settrace(None)

    assert isinstance(await asyncio.to_thread(look), Stats)
    for each in kept:  # loops that never ran: nothing of theirs can be closed
        pool.current()._by_loop.pop(id(each), None)
    assert steps > 10


async def test_reprs() -> None:
    """They say what is under way."""
    gate = RRef(Gate())
    waiting = [asyncio.create_task(remote(gate).passed()) for _ in range(3)]
    await remote(gate).entered()
    connection = pool.current().connection("main")
    assert repr(connection).startswith("<Connection to main, open: 3 waiting, <SendState open, 0 ")
    assert repr(entry_points.serving()) == "<Server main: 3 running>"
    assert repr(stats()).startswith("Stats(calls=4, in_flight=3, unsent=0, messages=")
    stream = aiter(call("main", actors.count, 1))
    assert repr(stream) == "<stream of count>"
    assert [item async for item in stream] == [0]
    called = remote(gate).open()
    assert repr(called) == "<call of open, not sent: await it>"
    await called
    await asyncio.gather(*waiting)
