"""`Group.map` over several objects of one worker: items, bounds, exceptions, deadlines."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
import torch

from aiorpc_torch import CallTimeout, RemoteError, WorkerLost, create, remote, timeout
from aiorpc_torch.observe import stats
from aiorpc_torch.types import RemoteTraceback
from tests.support.group_members import Node, Unpicklable, nodes
from tests.support.raw_connections import SOON
from tests.support.slack import BEGUN
from tests.support.torch_sending import refuse_messages

pytestmark = pytest.mark.usefixtures("world")


async def ticks(count: int, taken: list[int] | None = None) -> AsyncIterator[int]:
    for n in range(count):
        if taken is not None:
            taken.append(n)
        await asyncio.sleep(0)
        yield n


async def test_map_in_the_order_of_items() -> None:
    """Sync and async iterables, several, the shortest of them ends it."""
    group = await nodes()
    assert [x async for _, x in group.map(Node.plain, range(100))] == [*range(100)]
    assert [x async for _, x in group.map(Node.plain, ticks(50))] == [*range(50)]
    sums = group.map(Node.sum, ticks(5), range(10, 20))
    assert [x async for x in sums] == [10, 12, 14, 16, 18]
    assert [x async for x in group.map(Node.double, range(20), in_flight=4)] == [
        2 * n for n in range(20)
    ]
    assert [x async for x in group.map(Node.plain, [])] == []
    with pytest.raises(StopAsyncIteration):
        await anext(sums)


async def test_map_uses_every_member() -> None:
    group = await nodes()
    used = [number async for number, _ in group.map(Node.plain, range(12))]
    assert {*used} == {0, 1, 2}


class Tracked:
    """An iterator of numbers that knows how many were taken."""

    def __init__(self, count: int) -> None:
        self.taken = 0
        self._count = count

    def __iter__(self) -> "Tracked":
        return self

    def __next__(self) -> int:
        if self.taken == self._count:
            raise StopIteration
        self.taken += 1
        return self.taken - 1


class Turnstile:
    """A gate for each item, and how many items are inside."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self.open: dict[int, asyncio.Event] = {}
        self.came = asyncio.Condition()

    async def pass_(self, item: int) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        event = self.open.setdefault(item, asyncio.Event())
        async with self.came:
            self.came.notify_all()
        try:
            await event.wait()
        finally:
            self.inside -= 1
        return item

    async def let(self, item: int) -> None:
        self.open.setdefault(item, asyncio.Event()).set()

    async def has_inside(self, count: int) -> int:
        async with self.came:
            await self.came.wait_for(lambda: self.inside >= count)
        return self.most


@pytest.mark.parametrize("in_flight", [1, 3])
async def test_items_are_taken_when_a_slot_is_free(in_flight: int) -> None:
    """No member has more than `in_flight`, and nothing is taken without a slot."""
    group = await create([0, 0], Turnstile)
    items = Tracked(100)
    results = group.map(Turnstile.pass_, items, in_flight=in_flight)
    assert items.taken == 0, "lazy"
    first = asyncio.ensure_future(anext(results))
    assert await remote(group).has_inside(in_flight) == [in_flight, in_flight]
    for _ in range(10):
        await asyncio.sleep(0)
    assert items.taken == 2 * in_flight
    await remote(group).let(0)
    assert await first == 0
    await results.aclose()
    assert await remote(group).has_inside(0) == [in_flight, in_flight]


async def test_a_slow_first_item_bounds_the_others() -> None:
    """At most 4 × in_flight × members items are taken and not yielded."""
    group = await create([0, 0], Turnstile)
    for item in range(1, 100):
        await remote(group).let(item)
    items = Tracked(100)
    results = group.map(Turnstile.pass_, items, in_flight=2)
    first = asyncio.ensure_future(anext(results))
    async with asyncio.timeout(20):
        while items.taken < 16:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for _ in range(100):
        await asyncio.sleep(0)
    assert items.taken == 16
    await remote(group).let(0)
    assert await first == 0
    assert [item async for item in results] == [*range(1, 100)]


async def test_calls_go_on_while_the_consumer_works() -> None:
    """Slots are filled again without a step of the consumer."""
    group = await create([0], Turnstile)
    for item in range(100):
        await remote(group).let(item)
    items = Tracked(100)
    results = group.map(Turnstile.pass_, items, in_flight=1)
    assert await anext(results) == 0
    async with asyncio.timeout(20):
        while items.taken < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await results.aclose()


async def test_an_exception_is_raised_at_its_place() -> None:
    """The results before it come first; it ends the map, and cancels the rest."""
    group = await create([0, 0], Picky)
    found = []
    results = group.map(Picky.take, [0, 1, 2, -3, 4, 5, -6], in_flight=3)
    with pytest.raises(LookupError, match="-3") as raised:  # noqa: PT012
        async for item in results:
            found.append(item)  # noqa: PERF401
    assert found == [0, 1, 2]
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    with pytest.raises(StopAsyncIteration):
        await anext(results)
    assert stats().in_flight == 0


@pytest.mark.promise("maps.unordered")
async def test_results_as_they_complete() -> None:
    """Each with its item; several iterables give a tuple. A slow item delays no other."""
    group = await create([0, 0], Turnstile)
    passing = group.map_unordered(Turnstile.pass_, [3, 0, 0, 0], in_flight=4)
    await remote(group).let(0)
    found = [await anext(passing) for _ in range(3)]
    assert found == [(0, 0)] * 3
    await remote(group).let(3)
    assert [each async for each in passing] == [(3, 3)]
    sums = [each async for each in (await nodes()).map_unordered(Node.sum, [1, 2], [10, 20])]
    assert sorted(sums) == [((1, 10), 11), ((2, 20), 22)]


@pytest.mark.promise("maps.unordered")
async def test_an_exception_when_it_comes() -> None:
    """It ends the map, and cancels the rest."""
    group = await create([0, 0], Picky)
    results = group.map_unordered(Picky.take, [4, 5, -6, 7], in_flight=3)
    with pytest.raises(LookupError, match="-6"):
        await anext(results)
    with pytest.raises(StopAsyncIteration):
        await anext(results)
    assert stats().in_flight == 0


@pytest.mark.promise("maps.exceptions")
@pytest.mark.parametrize("ordered", [True, False])
async def test_exceptions_as_results(ordered: bool) -> None:
    """Of the method, and of an item that cannot be sent. That of an iterable ends the map."""

    def items() -> Iterator[Any]:
        yield from [0, -1, 2, Unpicklable(), 3]
        raise KeyError("source")

    group = await create([0, 0], Picky)
    found: list[Any] = []
    start = group.map if ordered else group.map_unordered
    with pytest.raises(KeyError, match="source"):  # noqa: PT012
        async for each in start(Picky.take, items(), return_exceptions=True):
            found.append(each if ordered else each[1])  # noqa: PERF401
    texts = [repr(each) for each in found]
    expected = ["0", "LookupError(-1)", "2", "LookupError('this is not pickled')", "3"]
    assert (texts if ordered else sorted(texts)) == (expected if ordered else sorted(expected))
    (failure,) = (each for each in found if repr(each) == "LookupError(-1)")
    assert isinstance(failure.__cause__, RemoteTraceback)


class Picky:
    async def take(self, item: int) -> int:
        if item < 0:
            raise LookupError(item)
        if item > 3:
            await asyncio.Event().wait()
        return item


class Broker:
    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, item: int) -> int:
        self.asked += 1
        if item == 1:
            raise WorkerLost("elsewhere")
        return item

    async def count(self) -> int:
        return self.asked


async def test_a_loss_that_a_method_reports_is_no_loss_of_the_member() -> None:
    """The method's own WorkerLost is an exception like any other: nothing is called again."""
    group = await create([0, 0], Broker)
    results = group.map(Broker.ask, [0, 1], retries=5)
    assert await anext(results) == 0
    with pytest.raises(WorkerLost, match="'elsewhere' is lost"):
        await anext(results)
    assert sum(await remote(group).count()) == 2


async def test_a_bad_item_is_raised_at_its_place() -> None:
    group = await nodes()
    found = []
    with pytest.raises(LookupError, match="not pickled"):  # noqa: PT012
        async for _, item in group.map(Node.plain, [0, 1, Unpicklable(), 3]):
            found.append(item)
    assert found == [0, 1]


async def test_an_item_that_is_refused_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exception comes in its place, although no answer does."""
    group = await nodes(1)
    await remote(group[0]).add(1)  # from then on, one call is sent within the step that makes it
    refuse_messages(monkeypatch)
    async with asyncio.timeout(SOON):
        with pytest.raises(RemoteError):
            await anext(group.map(Node.note, [torch.eye(3).to_sparse()]))
    assert stats().in_flight == 0


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_iterable_that_raises(asynchronous: bool) -> None:
    """Its exception comes in place of the item that it did not give."""
    group = await nodes()

    def broken() -> Iterator[int]:
        yield from range(3)
        raise KeyError("source")

    async def abroken() -> AsyncIterator[int]:
        for n in broken():
            yield n

    found = []
    with pytest.raises(KeyError, match="source"):  # noqa: PT012
        async for _, item in group.map(Node.plain, abroken() if asynchronous else broken()):
            found.append(item)
    assert found == [0, 1, 2]


@pytest.mark.parametrize("how", ["break", "aclose", "cancel"])
async def test_leaving_a_map_cancels_the_rest(how: str) -> None:
    """And nothing more is taken."""
    group = await create([0, 0], Turnstile)
    await remote(group).let(0)
    items = Tracked(100)

    async def consume() -> None:
        results = group.map(Turnstile.pass_, items)
        async for _ in results:
            if how == "break":
                return
            if how == "aclose":
                await results.aclose()

    consuming = asyncio.create_task(consume())
    if how == "cancel":
        async with asyncio.timeout(20):
            while items.taken < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        consuming.cancel()
    await asyncio.wait([consuming])
    taken = items.taken
    async with asyncio.timeout(20):
        while stats().running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert stats().in_flight == 0
    assert items.taken == taken


async def test_the_deadline_bounds_the_whole_map() -> None:
    """That at the first step: of running calls, and of an iterable that gives nothing."""
    group = await create([0], Turnstile)
    await remote(group).let(0)
    found = []
    with pytest.raises(CallTimeout):  # noqa: PT012
        with timeout(2 * BEGUN):
            async for item in group.map(Turnstile.pass_, range(5)):
                found.append(item)  # noqa: PERF401
    assert found == [0]

    async def slow() -> AsyncIterator[int]:
        yield 0
        await asyncio.Event().wait()

    results = group.map(Turnstile.pass_, slow())
    with timeout(2 * BEGUN):
        assert await anext(results) == 0
    with pytest.raises(CallTimeout, match=r"map of Turnstile.pass_ timed out"):
        await anext(results)
    with anyio.move_on_after(0.1) as scope:
        async for _ in group.map(Turnstile.pass_, [7]):
            pass
    assert scope.cancelled_caught


async def test_map_checks_its_arguments() -> None:
    """At the call, before the first step."""
    group: Any = await nodes()
    for options in ({"in_flight": 0}, {"in_flight": 1.5}, {"retries": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be an int"):
            group.map(Node.plain, [1], **options)
    for args in (("plain", [1]), (Node.plain, 3), (Node.plain,)):
        with pytest.raises(TypeError):
            group.map(*args)
