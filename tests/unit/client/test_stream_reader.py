"""The reader of a stream: order of items, credit and ends."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._client.stream_reader import Item, StreamReader
from aiorpc_torch._wire.columns import STREAM_END, HeldResult
from aiorpc_torch._wire.connection_state import BYTES_PER_CREDIT, INITIAL_CREDIT, credit_cost
from aiorpc_torch._wire.exceptions import RemoteFailure
from aiorpc_torch._wire.pickling import CallAborted
from aiorpc_torch._wire.targets import FetchTarget
from aiorpc_torch.errors import WorkerLost

FAILURE = RemoteFailure.of(ValueError("of the generator"), "there")
LOST = CallAborted(WorkerLost("there"))


class Consumer:
    """A consumer of items, and the credit that is granted meanwhile."""

    def __init__(self) -> None:
        self.granted: list[int] = []
        self.reader = StreamReader()
        self.reader.connection, self.reader.target = self, FetchTarget((0, 0))

    def grant(self, _: int, credit: int) -> None:
        """Note credit, as a connection sends it."""
        self.granted.append(credit)

    def take(self) -> Any:
        """Return the next item; raise AssertionError if there is none yet."""
        step = self.reader.next()
        try:
            step.send(None)
        except StopIteration as stop:
            return stop.value
        step.close()
        raise AssertionError("it would wait")

    def take_all(self) -> list[Any]:
        """Return the items until the end."""
        items = []
        while True:
            try:
                item = self.take()
            except StopAsyncIteration:
                return items
            items.append(item)


# ── order ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("streams.order")
@given(st.integers(0, 30))
def test_items_come_in_order(count: int) -> None:
    """Each item is taken once, in the order of its yield, before the end."""
    consumer = Consumer()
    for index in range(count):
        assert consumer.reader.add(-index, 1) is None
    assert consumer.reader.add(STREAM_END, 0) is None
    assert consumer.take_all() == [-index for index in range(count)]
    assert consumer.take_all() == []


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[bool], list[int]]:
    """Draw which items are held, and the order in which they are filled."""
    held = draw(st.lists(st.booleans(), max_size=20))
    return held, draw(st.permutations([index for index, is_held in enumerate(held) if is_held]))


@given(arrivals(), st.data())
def test_held_items_filled_in_any_order(case: tuple[list[bool], list[int]], data: Any) -> None:
    """Items can be taken, in order, up to the first one that is held."""
    held, fills = case
    consumer, taken = Consumer(), []
    held_items: dict[int, Item] = {}
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
        item = consumer.reader.add(HeldResult(index) if held[index] else index, 1)
        assert (item is not None) is held[index]
        if item is not None:
            held_items[index] = item
        arrived += 1

    for index in fills:
        while index not in held_items or (arrived < len(held) and data.draw(st.booleans())):
            arrive()
            take_what_is_there()
        consumer.reader.fill(held_items[index], index)
        missing.remove(index)
        take_what_is_there()
    while arrived < len(held):
        arrive()
    consumer.reader.add(STREAM_END, 0)
    assert taken + consumer.take_all() == [*range(len(held))]


@pytest.mark.parametrize("item", [None, False, StopAsyncIteration(), ValueError("yielded"), []])
def test_whatever_is_an_item_is_not_an_end(item: Any) -> None:
    """A yielded exception is an item, and is not raised."""
    consumer = Consumer()
    assert consumer.reader.add(item, 1) is None
    assert consumer.take() is item
    held = consumer.reader.add(HeldResult(1), 1)
    assert held is not None
    consumer.reader.fill(held, item)
    assert consumer.take() is item


# ── credit ──────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(1, 3 * INITIAL_CREDIT), min_size=1, max_size=100))
def test_all_that_was_taken_is_granted(prices: list[int]) -> None:
    """Credit goes in few messages, before the producer has to wait for it."""
    consumer, taken = Consumer(), 0
    for index, cost in enumerate(prices):
        consumer.reader.add(index, cost)
    assert consumer.granted == [], "what only lies there is not granted"
    for cost in prices:
        consumer.take()
        taken += cost
        assert 0 <= taken - sum(consumer.granted) < INITIAL_CREDIT // 2
    assert all(credit >= INITIAL_CREDIT // 2 for credit in consumer.granted)


def test_held_items_are_granted_when_taken() -> None:
    """An item that is only collected grants no credit."""
    consumer = Consumer()
    item = consumer.reader.add(HeldResult(1), INITIAL_CREDIT)
    assert item is not None
    consumer.reader.fill(item, "a")
    assert consumer.granted == []
    assert consumer.take() == "a"
    assert consumer.granted == [INITIAL_CREDIT]


@given(st.integers(0, 3 * INITIAL_CREDIT))
def test_nothing_is_granted_after_the_end(count: int) -> None:
    """The producer has ended, so it needs no credit."""
    consumer = Consumer()
    for index in range(count):
        consumer.reader.add(index, 1)
    consumer.reader.add(STREAM_END, 0)
    assert len(consumer.take_all()) == count
    assert consumer.granted == []


@given(st.integers(0, 100 * BYTES_PER_CREDIT), st.integers(0, 100 * BYTES_PER_CREDIT))
def test_the_price_of_an_item(one: int, other: int) -> None:
    """Every item has a cost; that of large items follows their bytes."""
    assert credit_cost(0) == 1
    assert (
        credit_cost(one) + credit_cost(other) - 2
        <= credit_cost(one + other)
        <= credit_cost(one) + credit_cost(other)
    )


# ── how it ends ─────────────────────────────────────────────────────────────────────────────────


def test_an_error_comes_after_the_items() -> None:
    """The error is raised once, after the items that were yielded before it."""
    consumer = Consumer()
    item = consumer.reader.add(HeldResult(1), 1)
    assert item is not None
    assert consumer.reader.add("b", 1) is None
    assert consumer.reader.add(FAILURE, 0) is None
    consumer.reader.fill(item, "a")
    assert [consumer.take(), consumer.take()] == ["a", "b"]
    with pytest.raises(ValueError, match="of the generator"):
        consumer.take()
    assert consumer.take_all() == []


def test_a_failure_comes_after_the_items() -> None:
    """Items that come after the failure are dropped."""
    consumer = Consumer()
    consumer.reader.add("a", 1)
    consumer.reader.fail(LOST)
    assert consumer.reader.add("b", 1) is None
    assert consumer.take() == "a"
    with pytest.raises(WorkerLost) as one:
        consumer.take()
    assert one.value is not LOST.error, "each caller has its own"
    assert consumer.take_all() == []


@given(arrivals())
def test_a_failure_ends_the_stream_at_the_first_held_item(
    case: tuple[list[bool], list[int]],
) -> None:
    """Items before the first held one can be taken, then the error is raised."""
    held, fills = case
    consumer = Consumer()
    held_items = [
        consumer.reader.add(HeldResult(index) if is_held else index, 1)
        for index, is_held in enumerate(held)
    ]
    filled, gaps = fills[: len(fills) // 2], fills[len(fills) // 2 :]
    for index in filled:
        item = held_items[index]
        assert item is not None
        consumer.reader.fill(item, index)
    consumer.reader.fail(LOST)
    for index in gaps:  # its value comes too late
        item = held_items[index]
        assert item is not None
        consumer.reader.fill(item, index)
    for index in range(min(gaps, default=len(held))):
        assert consumer.take() == index
    with pytest.raises(WorkerLost):
        consumer.take()
    assert consumer.take_all() == []


@pytest.mark.parametrize("value", [FAILURE, LOST], ids=["failure", "lost"])
def test_a_held_item_that_is_not_to_be_had(value: Any) -> None:
    """Its error is raised in place of the item, and the stream ends."""
    consumer = Consumer()
    consumer.reader.add("a", 1)
    item = consumer.reader.add(HeldResult(1), 1)
    assert item is not None
    consumer.reader.add("c", 1)
    consumer.reader.fill(item, value)
    assert consumer.take() == "a"
    with pytest.raises((ValueError, WorkerLost)):
        consumer.take()
    assert consumer.take_all() == []


def test_the_first_end_counts() -> None:
    """The loss of a peer after the end drops no item."""
    consumer = Consumer()
    consumer.reader.add("a", 1)
    consumer.reader.add(STREAM_END, 0)
    consumer.reader.fail(LOST)
    assert consumer.take_all() == ["a"]


def test_after_it_was_left() -> None:
    """A closed reader has only the end; later items are dropped."""
    consumer = Consumer()
    consumer.reader.add("a", 1)
    item = consumer.reader.add(HeldResult(1), 1)
    assert item is not None
    consumer.reader.close()
    consumer.reader.fill(item, "b")
    assert consumer.reader.add("c", 1) is None
    assert consumer.reader.add(HeldResult(1), 1) is None, "it is not collected"
    consumer.reader.fail(LOST)
    assert consumer.take_all() == []


# ── waiting ─────────────────────────────────────────────────────────────────────────────────────


async def waiting(consumer: Consumer) -> "asyncio.Task[Any]":
    task = asyncio.create_task(consumer.reader.next())
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_an_item_wakes_its_waiter() -> None:
    """A held item wakes the waiter when it is filled."""
    consumer = Consumer()
    task = await waiting(consumer)
    consumer.reader.add("a", 1)
    assert await task == "a"
    task = await waiting(consumer)
    held_items = [consumer.reader.add(HeldResult(1), 1) for _ in range(2)]
    for item, value in zip(reversed(held_items), ("c", "b"), strict=True):
        await asyncio.sleep(0)
        assert not task.done()
        assert item is not None
        consumer.reader.fill(item, value)
    assert await task == "b"
    assert await consumer.reader.next() == "c"


@pytest.mark.parametrize(
    "end", [STREAM_END, FAILURE, LOST, None], ids=["end", "failure", "lost", "left"]
)
async def test_every_end_wakes_the_waiter(end: Any) -> None:
    """No waiter is left behind."""
    consumer = Consumer()
    task = await waiting(consumer)
    if end is None:
        consumer.reader.close()
    elif end is LOST:
        consumer.reader.fail(end)
    else:
        assert consumer.reader.add(end, 0) is None
    error = {LOST: WorkerLost, FAILURE: ValueError}.get(end, StopAsyncIteration)
    with pytest.raises(error):
        await task


async def test_a_cancelled_wait_loses_nothing() -> None:
    """The item is kept, also if it came in the loop iteration of the cancellation."""
    consumer = Consumer()
    for index in range(3):
        task = await waiting(consumer)
        if index:
            consumer.reader.add(index - 1, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if index:
            assert await consumer.reader.next() == index - 1


@pytest.mark.parametrize("ended", [False, True], ids=["going on", "ended"])
def test_a_deadline_while_items_are_collected(ended: bool) -> None:
    """What has not come is dropped, and the failure is told, also if the end had come."""
    consumer = Consumer()
    consumer.reader.add(1, 1)
    consumer.reader.add(HeldResult(5), 1)
    if ended:
        consumer.reader.add(STREAM_END, 0)
    assert consumer.reader.is_collecting()
    consumer.reader.fail(LOST)
    assert not consumer.reader.is_collecting()
    assert consumer.take() == 1
    with pytest.raises(WorkerLost):
        consumer.take()
    assert consumer.take_all() == []
