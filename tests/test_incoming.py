"""The consumer's end of a stream: items in order, credit for what was taken, and how it ends."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorpc_torch._columns import END
from aiorpc_torch._exceptions import Failure
from aiorpc_torch._incoming import Incoming
from aiorpc_torch._streams import CREDIT
from aiorpc_torch._wire import Broken
from aiorpc_torch.errors import WorkerLost

FAILURE = Failure.of(ValueError("of the generator"), "there")
LOST = Broken(WorkerLost("there"))


class Consumer:
    """Somebody who takes items, and the credit that is granted meanwhile."""

    def __init__(self) -> None:
        self.granted: list[int] = []
        self.incoming = Incoming(self.granted.append)

    def take(self) -> Any:
        """The next item; AssertionError if there is none yet."""
        step = self.incoming.next()
        try:
            step.send(None)
        except StopIteration as stop:
            return stop.value
        step.close()
        raise AssertionError("it would wait")

    def take_all(self) -> list[Any]:
        """What there is until the end."""
        items = []
        while True:
            try:
                item = self.take()
            except StopAsyncIteration:
                return items
            items.append(item)


# ── order ───────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 30).flatmap(lambda count: st.permutations(range(count + 1))))
def test_any_order_of_arrival(arrivals: list[int]) -> None:
    """Items are taken in the order in which they were yielded, each once, and then the end."""
    consumer, last = Consumer(), len(arrivals) - 1
    ended = [
        consumer.incoming.arrived(index, *((END, 0) if index == last else (-index, 1)))
        for index in arrivals
    ]
    assert ended == [False] * last + [True], "it ends when nothing is missing any more"
    assert consumer.take_all() == [-index for index in range(last)]
    assert consumer.take_all() == []


@given(st.integers(0, 20).flatmap(lambda count: st.permutations(range(count))), st.integers(0, 20))
def test_no_item_before_its_turn(arrivals: list[int], missing: int) -> None:
    """What has come is taken up to the first gap, and no further."""
    consumer = Consumer()
    for index in arrivals:
        if index != missing:
            consumer.incoming.arrived(index, index, 1)
    for index in range(min(missing, len(arrivals))):
        assert consumer.take() == index


@pytest.mark.parametrize("item", [None, False, StopAsyncIteration(), ValueError("yielded"), []])
def test_whatever_is_an_item_is_not_an_end(item: Any) -> None:
    """Nor is an exception raised that was yielded."""
    consumer = Consumer()
    assert not consumer.incoming.arrived(0, item, 1)
    assert consumer.take() is item


# ── credit ──────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(1, 3 * CREDIT), min_size=1, max_size=100))
def test_all_that_was_taken_is_granted(prices: list[int]) -> None:
    """In few messages, and early enough that the producer need not wait for the last item."""
    consumer, taken = Consumer(), 0
    for index, price in enumerate(prices):
        consumer.incoming.arrived(index, index, price)
    assert consumer.granted == [], "what only lies there is not granted"
    for price in prices:
        consumer.take()
        taken += price
        assert 0 <= taken - sum(consumer.granted) < CREDIT // 2
    assert all(credit >= CREDIT // 2 for credit in consumer.granted)


@given(st.integers(0, 3 * CREDIT))
def test_nothing_is_granted_after_the_end(count: int) -> None:
    """Nobody waits for it."""
    consumer = Consumer()
    for index in range(count):
        consumer.incoming.arrived(index, index, 1)
    consumer.incoming.arrived(count, END, 0)
    assert len(consumer.take_all()) == count
    assert consumer.granted == []


# ── how it ends ─────────────────────────────────────────────────────────────────────────────────


def test_an_error_comes_after_the_items() -> None:
    """Those that were yielded before it; then it is raised, once."""
    consumer = Consumer()
    assert not consumer.incoming.arrived(2, FAILURE, 0)
    assert not consumer.incoming.arrived(1, "b", 1)
    assert consumer.incoming.arrived(0, "a", 1)
    assert [consumer.take(), consumer.take()] == ["a", "b"]
    with pytest.raises(ValueError, match="of the generator"):
        consumer.take()
    assert consumer.take_all() == []


def test_what_breaks_it_comes_after_the_items() -> None:
    """Those that have arrived; what comes later comes for nobody."""
    consumer = Consumer()
    consumer.incoming.arrived(0, "a", 1)
    consumer.incoming.arrived(2, "c", 1)
    consumer.incoming.fail(LOST)
    assert consumer.take() == "a"
    with pytest.raises(WorkerLost) as one:
        consumer.take()
    assert one.value is not LOST.error, "each caller has its own"
    assert consumer.take_all() == []


def test_the_first_end_counts() -> None:
    """A peer that is lost after the stream has ended takes nothing from it."""
    consumer = Consumer()
    consumer.incoming.arrived(0, "a", 1)
    consumer.incoming.arrived(1, END, 0)
    consumer.incoming.fail(LOST)
    assert consumer.take_all() == ["a"]


def test_after_it_was_left() -> None:
    """There is only the end, whatever lay there and whatever still comes."""
    consumer = Consumer()
    consumer.incoming.arrived(0, "a", 1)
    consumer.incoming.close()
    consumer.incoming.fail(LOST)
    assert consumer.take_all() == []


# ── waiting ─────────────────────────────────────────────────────────────────────────────────────


async def waiting(consumer: Consumer) -> "asyncio.Task[Any]":
    task = asyncio.create_task(consumer.incoming.next())
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_an_item_wakes_who_waits_for_it() -> None:
    """And one that is early does not."""
    consumer = Consumer()
    task = await waiting(consumer)
    consumer.incoming.arrived(1, "b", 1)
    await asyncio.sleep(0)
    assert not task.done()
    consumer.incoming.arrived(0, "a", 1)
    assert await task == "a"
    assert await consumer.incoming.next() == "b"


@pytest.mark.parametrize("end", [END, FAILURE, LOST, None], ids=["end", "failure", "lost", "left"])
async def test_every_end_wakes_who_waits(end: Any) -> None:
    """Nobody waits for what does not come."""
    consumer = Consumer()
    task = await waiting(consumer)
    if end is None:
        consumer.incoming.close()
    elif end is LOST:
        consumer.incoming.fail(end)
    else:
        assert consumer.incoming.arrived(0, end, 0)
    error = {LOST: WorkerLost, FAILURE: ValueError}.get(end, StopAsyncIteration)
    with pytest.raises(error):
        await task


async def test_a_cancelled_wait_loses_nothing() -> None:
    """Even if the item came in the same turn."""
    consumer = Consumer()
    for index in range(3):
        task = await waiting(consumer)
        if index:
            consumer.incoming.arrived(index - 1, index - 1, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if index:
            assert await consumer.incoming.next() == index - 1
