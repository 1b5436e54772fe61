"""The consumer's end of a stream: items in order, credit for what was taken, and how it ends."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorpc_torch._client.stream_reader import Incoming, Item
from aiorpc_torch._protocol.columns import END, Held
from aiorpc_torch._protocol.exceptions import Failure
from aiorpc_torch._protocol.targets import Broken
from aiorpc_torch._protocol.window import CREDIT, LARGE, price
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


@given(st.integers(0, 30))
def test_items_come_in_order(count: int) -> None:
    """They are taken as they were yielded, each once, and then comes the end."""
    consumer = Consumer()
    for index in range(count):
        assert consumer.incoming.arrived(-index, 1) is None
    assert consumer.incoming.arrived(END, 0) is None
    assert consumer.take_all() == [-index for index in range(count)]
    assert consumer.take_all() == []


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[bool], list[int]]:
    """Of each item whether it is held, and in which order the held ones are filled."""
    held = draw(st.lists(st.booleans(), max_size=20))
    return held, draw(st.permutations([index for index, is_held in enumerate(held) if is_held]))


@given(arrivals(), st.data())
def test_held_items_filled_in_any_order(case: tuple[list[bool], list[int]], data: Any) -> None:
    """What was taken is always the longest run of items that are there, in order."""
    held, fills = case
    consumer, taken = Consumer(), []
    places: dict[int, Item] = {}
    arrived = 0  # items so far
    missing = set(fills)

    def take_what_is_there() -> None:
        while len(taken) < arrived and len(taken) not in missing:
            taken.append(consumer.take())
        with pytest.raises(RuntimeError, match="no running event loop"):  # it would wait
            consumer.take()
        assert taken == [*range(len(taken))]

    def arrive() -> None:
        nonlocal arrived
        index = arrived
        place = consumer.incoming.arrived(Held(index) if held[index] else index, 1)
        assert (place is not None) is held[index]
        if place is not None:
            places[index] = place
        arrived += 1

    for index in fills:
        while index not in places or (arrived < len(held) and data.draw(st.booleans())):
            arrive()
            take_what_is_there()
        consumer.incoming.fill(places[index], index)
        missing.remove(index)
        take_what_is_there()
    while arrived < len(held):
        arrive()
    consumer.incoming.arrived(END, 0)
    assert taken + consumer.take_all() == [*range(len(held))]


@pytest.mark.parametrize("item", [None, False, StopAsyncIteration(), ValueError("yielded"), []])
def test_whatever_is_an_item_is_not_an_end(item: Any) -> None:
    """Nor is an exception raised that was yielded."""
    consumer = Consumer()
    assert consumer.incoming.arrived(item, 1) is None
    assert consumer.take() is item
    place = consumer.incoming.arrived(Held(1), 1)
    assert place is not None
    consumer.incoming.fill(place, item)
    assert consumer.take() is item


# ── credit ──────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(1, 3 * CREDIT), min_size=1, max_size=100))
def test_all_that_was_taken_is_granted(prices: list[int]) -> None:
    """In few messages, and early enough that the producer need not wait for the last item."""
    consumer, taken = Consumer(), 0
    for index, cost in enumerate(prices):
        consumer.incoming.arrived(index, cost)
    assert consumer.granted == [], "what only lies there is not granted"
    for cost in prices:
        consumer.take()
        taken += cost
        assert 0 <= taken - sum(consumer.granted) < CREDIT // 2
    assert all(credit >= CREDIT // 2 for credit in consumer.granted)


def test_what_is_held_is_granted_when_it_was_taken() -> None:
    """To collect an item is not to take it."""
    consumer = Consumer()
    place = consumer.incoming.arrived(Held(1), CREDIT)
    assert place is not None
    consumer.incoming.fill(place, "a")
    assert consumer.granted == []
    assert consumer.take() == "a"
    assert consumer.granted == [CREDIT]


@given(st.integers(0, 3 * CREDIT))
def test_nothing_is_granted_after_the_end(count: int) -> None:
    """Nobody waits for it."""
    consumer = Consumer()
    for index in range(count):
        consumer.incoming.arrived(index, 1)
    consumer.incoming.arrived(END, 0)
    assert len(consumer.take_all()) == count
    assert consumer.granted == []


@given(st.integers(0, 100 * LARGE), st.integers(0, 100 * LARGE))
def test_the_price_of_an_item(one: int, other: int) -> None:
    """Every item costs something, and large ones about as much as their bytes."""
    assert price(0) == 1
    assert price(one) + price(other) - 2 <= price(one + other) <= price(one) + price(other)


# ── how it ends ─────────────────────────────────────────────────────────────────────────────────


def test_an_error_comes_after_the_items() -> None:
    """Those that were yielded before it; then it is raised, once."""
    consumer = Consumer()
    place = consumer.incoming.arrived(Held(1), 1)
    assert place is not None
    assert consumer.incoming.arrived("b", 1) is None
    assert consumer.incoming.arrived(FAILURE, 0) is None
    consumer.incoming.fill(place, "a")
    assert [consumer.take(), consumer.take()] == ["a", "b"]
    with pytest.raises(ValueError, match="of the generator"):
        consumer.take()
    assert consumer.take_all() == []


def test_what_breaks_it_comes_after_the_items() -> None:
    """Those that have arrived; what comes later comes for nobody."""
    consumer = Consumer()
    consumer.incoming.arrived("a", 1)
    consumer.incoming.fail(LOST)
    assert consumer.incoming.arrived("b", 1) is None
    assert consumer.take() == "a"
    with pytest.raises(WorkerLost) as one:
        consumer.take()
    assert one.value is not LOST.error, "each caller has its own"
    assert consumer.take_all() == []


@given(arrivals())
def test_what_breaks_it_ends_it_at_the_first_gap(case: tuple[list[bool], list[int]]) -> None:
    """Items before the first one that is still held are taken, then the error is raised."""
    held, fills = case
    consumer = Consumer()
    places = [
        consumer.incoming.arrived(Held(index) if is_held else index, 1)
        for index, is_held in enumerate(held)
    ]
    filled, gaps = fills[: len(fills) // 2], fills[len(fills) // 2 :]
    for index in filled:
        place = places[index]
        assert place is not None
        consumer.incoming.fill(place, index)
    consumer.incoming.fail(LOST)
    for index in gaps:  # its value comes too late
        place = places[index]
        assert place is not None
        consumer.incoming.fill(place, index)
    for index in range(min(gaps, default=len(held))):
        assert consumer.take() == index
    with pytest.raises(WorkerLost):
        consumer.take()
    assert consumer.take_all() == []


@pytest.mark.parametrize("value", [FAILURE, LOST], ids=["failure", "lost"])
def test_a_held_item_that_is_not_to_be_had(value: Any) -> None:
    """Its error is raised in its place, and nothing comes after it."""
    consumer = Consumer()
    consumer.incoming.arrived("a", 1)
    place = consumer.incoming.arrived(Held(1), 1)
    assert place is not None
    consumer.incoming.arrived("c", 1)
    consumer.incoming.fill(place, value)
    assert consumer.take() == "a"
    with pytest.raises((ValueError, WorkerLost)):
        consumer.take()
    assert consumer.take_all() == []


def test_the_first_end_counts() -> None:
    """A peer that is lost after the stream has ended takes nothing from it."""
    consumer = Consumer()
    consumer.incoming.arrived("a", 1)
    consumer.incoming.arrived(END, 0)
    consumer.incoming.fail(LOST)
    assert consumer.take_all() == ["a"]


def test_after_it_was_left() -> None:
    """There is only the end, whatever lay there and whatever still comes."""
    consumer = Consumer()
    consumer.incoming.arrived("a", 1)
    place = consumer.incoming.arrived(Held(1), 1)
    assert place is not None
    consumer.incoming.close()
    consumer.incoming.fill(place, "b")
    assert consumer.incoming.arrived("c", 1) is None
    assert consumer.incoming.arrived(Held(1), 1) is None, "nobody collects it"
    consumer.incoming.fail(LOST)
    assert consumer.take_all() == []


# ── waiting ─────────────────────────────────────────────────────────────────────────────────────


async def waiting(consumer: Consumer) -> "asyncio.Task[Any]":
    task = asyncio.create_task(consumer.incoming.next())
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_an_item_wakes_who_waits_for_it() -> None:
    """At once, and where it is held when its value is there."""
    consumer = Consumer()
    task = await waiting(consumer)
    consumer.incoming.arrived("a", 1)
    assert await task == "a"
    task = await waiting(consumer)
    places = [consumer.incoming.arrived(Held(1), 1) for _ in range(2)]
    for place, value in zip(reversed(places), ("c", "b"), strict=True):
        await asyncio.sleep(0)
        assert not task.done()
        assert place is not None
        consumer.incoming.fill(place, value)
    assert await task == "b"
    assert await consumer.incoming.next() == "c"


async def test_it_says_whether_somebody_waits() -> None:
    """From the first step of `next` until there is an item."""
    consumer = Consumer()
    assert not consumer.incoming.is_awaited()
    task = await waiting(consumer)
    assert consumer.incoming.is_awaited()
    consumer.incoming.arrived("a", 1)
    assert not consumer.incoming.is_awaited()
    assert await task == "a"


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
        assert consumer.incoming.arrived(end, 0) is None
    error = {LOST: WorkerLost, FAILURE: ValueError}.get(end, StopAsyncIteration)
    with pytest.raises(error):
        await task


async def test_a_cancelled_wait_loses_nothing() -> None:
    """Even if the item came in the same turn."""
    consumer = Consumer()
    for index in range(3):
        task = await waiting(consumer)
        if index:
            consumer.incoming.arrived(index - 1, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if index:
            assert await consumer.incoming.next() == index - 1
