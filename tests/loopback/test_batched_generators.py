"""`@batched` generators: one iteration for many callers, who end, leave and fail apart."""

import asyncio
import decimal
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    BatchContractError,
    Broadcast,
    CallTimeout,
    Fill,
    Group,
    QueueFull,
    Round,
    batched,
    create,
    each,
    exclusive,
    is_cancelled,
    remote,
)
from aiorpc_torch.observe import stats
from aiorpc_torch.testing.limits import STREAM_CREDIT
from tests.support.slack import BEGUN
from tests.support.two_ends import until

pytestmark = pytest.mark.usefixtures("world")

PATIENCE = 30.0


def entries_of(counts: Sequence[int]) -> Iterator[list[Any]]:
    """The steps for callers that want so many items each."""
    for step in range(max(counts)):
        yield [step if step < count else StopAsyncIteration() for count in counts]


TOGETHER: dict[str, Any] = {"max_size": lambda self: self.callers, "max_wait": 60.0}
"""A batch of so many callers, however they arrive."""


class Counters:
    """Generators that note what becomes of them."""

    def __init__(self) -> None:
        self.callers = 1
        self.begun: list[list[int]] = []
        self.closed = threading.Event()
        self.steps = 0
        self.cancelled: list[bool] = []

    @batched(**TOGETHER)
    async def count(self, counts: list[int]) -> AsyncIterator[list[Any]]:
        self.begun.append(counts)
        try:
            for entries in entries_of(counts):
                self.steps += 1
                yield entries
        finally:
            self.closed.set()

    @batched(**TOGETHER)
    def count_in_thread(self, counts: list[int]) -> Iterator[list[Any]]:
        self.begun.append(counts)
        try:
            for entries in entries_of(counts):
                self.steps += 1
                yield entries
                self.cancelled.append(is_cancelled())
        finally:
            self.closed.set()

    @batched(**TOGETHER)
    async def wait(self, items: list[int]) -> AsyncIterator[list[int]]:
        try:
            yield items
            await asyncio.get_running_loop().create_future()
        finally:
            self.closed.set()

    @batched(**TOGETHER, stack=True)
    def stacked(self, x: Tensor) -> Iterator[Tensor]:
        for factor in range(3):
            yield x * factor

    @batched(**TOGETHER, max_weight=8, concat=True, pad_to=(8,))
    async def rows(self, x: Tensor) -> AsyncIterator[Tensor]:
        assert len(x) == 8
        for factor in range(3):
            yield x * factor

    @batched(**TOGETHER)
    async def fails(self, items: list[int]) -> AsyncIterator[list[Any]]:
        yield items
        yield [LookupError(str(item)) if item % 2 else item for item in items]
        raise ArithmeticError("all")

    @batched(**TOGETHER)
    async def too_few(self, items: list[int]) -> AsyncIterator[list[int]]:
        yield items
        yield items[1:]

    @batched(**TOGETHER)
    async def unsendable(self, items: list[int]) -> AsyncIterator[list[Any]]:
        yield [threading.Lock() if item == 0 else item for item in items]
        yield items

    @batched(**TOGETHER)
    async def ends(self, items: list[int]) -> AsyncIterator[Any]:
        yield each(items)
        yield each([item if item else StopAsyncIteration for item in items])
        yield Broadcast(StopAsyncIteration())
        yield items


kinds = pytest.mark.parametrize("kind", ["count", "count_in_thread"])


async def made(callers: int = 1) -> tuple[Counters, Any]:
    """The object, whose batches are of so many callers, and its proxy."""
    rref = await create("main", Counters)
    counters = rref.local_value()
    counters.callers = callers
    return counters, remote(rref)


async def take(items: AsyncIterator[Any], most: int | None = None) -> list[Any]:
    found: list[Any] = []
    async for item in items:
        found.append(item)
        if len(found) == most:
            break
    return found


async def all_of(*awaitables: Any) -> list[Any]:
    """Their outcomes; nothing hangs."""
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*awaitables, return_exceptions=True)


# ── items ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("batching.generators")
@kinds
async def test_one_iteration_for_many_callers(kind: str) -> None:
    """Each gets its entries in order, and ends at its own StopAsyncIteration."""
    counters, proxy = await made(4)
    counts = [1, 3 * STREAM_CREDIT, 0, 2]
    found = await all_of(*(take(getattr(proxy, kind)(count)) for count in counts))
    assert found == [[*range(count)] for count in counts]
    assert counters.begun == [counts]
    await until(counters.closed.is_set)
    assert stats().batches[f"Counters.{kind}"].items >= len(counts)


@kinds
async def test_local_callers(kind: str) -> None:
    """They share batches with remote ones."""
    counters, proxy = await made(3)
    own: Any = getattr(counters, kind)
    found = await all_of(take(own(2)), take(getattr(proxy, kind)(3)), take(own(200)))
    assert found == [[0, 1], [0, 1, 2], [*range(200)]]
    assert [sorted(each) for each in counters.begun] == [[2, 3, 200]]


async def test_functions() -> None:
    """Without a world too: here by local calls."""

    @batched(max_size=4)
    async def body(counts: list[int]) -> AsyncIterator[list[Any]]:
        for entries in entries_of(counts):
            yield entries

    assert await all_of(*(take(body(count)) for count in (2, 1))) == [[0, 1], [0]]


async def test_trees_of_tensors() -> None:
    """Stacked and joined by rows: each caller gets its rows of each step."""
    _, proxy = await made(3)
    inputs = [torch.full((2,), float(n)) for n in range(3)]
    for found, x in zip(
        await all_of(*(take(proxy.stacked(x)) for x in inputs)), inputs, strict=True
    ):
        assert [each.tolist() for each in found] == [(x * n).tolist() for n in range(3)]
    some = [torch.ones(n, 2) for n in (1, 0, 3)]
    for found, x in zip(await all_of(*(take(proxy.rows(x)) for x in some)), some, strict=True):
        assert [each.tolist() for each in found] == [(x * n).tolist() for n in range(3)]


async def test_items_for_all() -> None:
    """`Broadcast`, and ends in all forms; a Round takes none."""
    _, proxy = await made(3)
    assert await all_of(*(take(proxy.ends(n)) for n in (0, 1, 2))) == [[0], [1, 1], [2, 2]]

    @batched(Fill(4))
    async def shared(items: list[int]) -> AsyncIterator[Any]:
        yield Broadcast(sum(items))

    assert await all_of(take(shared(1)), take(shared(2))) == [[3], [3]]
    with pytest.raises(TypeError, match="a Round gives one result to all of its callers"):
        batched(Round(2))(shared._function)


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


async def outcome(items: AsyncIterator[Any]) -> tuple[list[Any], Exception | None]:
    """What came, and what it ended with."""
    found: list[Any] = []
    try:
        async for item in items:
            found.append(item)  # noqa: PERF401 - some have come before an error
    except Exception as exc:
        return found, exc
    return found, None


@pytest.mark.promise("batching.generators")
async def test_errors() -> None:
    """An exception as an entry is that caller's; one that is raised is everyone's own."""
    _, proxy = await made(3)
    (odd, of_odd), (even, of_even), (more, of_more) = await all_of(
        *(outcome(proxy.fails(n)) for n in (1, 2, 4))
    )
    assert (odd, even, more) == ([1], [2, 2], [4, 4])
    assert type(of_odd) is LookupError
    assert type(of_even) is type(of_more) is ArithmeticError
    assert of_even is not of_more


async def test_a_step_without_an_entry_for_each() -> None:
    _, proxy = await made(2)
    for found, exc in await all_of(*(outcome(proxy.too_few(n)) for n in (1, 2))):
        assert len(found) == 1
        assert type(exc) is BatchContractError
        assert "got a batch of 2 and yielded 1 results: each step has one entry" in str(exc)


async def test_an_item_that_cannot_be_sent() -> None:
    """The error of its caller alone."""
    _, proxy = await made(2)
    (_, failure), (found, none) = await all_of(*(outcome(proxy.unsendable(n)) for n in (0, 1)))
    assert isinstance(failure, TypeError)
    assert "pickle" in str(failure)
    assert (found, none) == ([1, 1], None)


async def test_mistakes() -> None:
    """An `await` of it, a group of it, `async for` over a function that returns."""
    counters, proxy = await made()
    with pytest.raises(TypeError, match=r"count is a generator; use `async for`, not `await`"):
        await proxy.count(1)
    rref = await create("main", Counters)
    with pytest.raises(ExceptionGroup) as caught:
        await remote(Group([rref])).count(1)
    assert "a group does not stream" in str(caught.value.exceptions[0])
    with pytest.raises(TypeError, match="use `async for`"):
        await asyncio.to_thread(lambda: counters.count(1))

    @batched(max_size=2)
    async def no_steps(items: list[int]) -> AsyncIterator[Any]:
        for _ in ():
            yield items

    assert await all_of(take(no_steps(1))) == [[]]


# ── callers that leave ──────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("batching.generators")
@kinds
async def test_one_that_leaves(kind: str) -> None:
    """The others go on; the generator is closed once all have left."""
    counters, proxy = await made(2)
    endless = 10**9
    first, second = await all_of(
        take(getattr(proxy, kind)(endless), 1), take(getattr(proxy, kind)(endless), 300)
    )
    assert (first, second) == ([0], [*range(300)])
    await until(counters.closed.is_set)
    assert counters.steps < 300 + 10 * STREAM_CREDIT
    if kind == "count_in_thread":
        assert not counters.cancelled[0]


@pytest.mark.parametrize("is_local", [False, True])
async def test_a_generator_that_waits_is_closed(is_local: bool) -> None:
    """At its `await`, once all callers have left it."""
    counters, proxy = await made(2)
    owner: Any = counters if is_local else proxy
    streams = [aiter(owner.wait(n)) for n in range(2)]
    assert await all_of(*map(anext, streams)) == [0, 1]
    await streams[0].aclose()
    assert not counters.closed.is_set()
    if is_local:
        del streams  # a dropped one has left
        gc.collect()
    else:
        await streams[1].aclose()
    await until(counters.closed.is_set)


async def test_a_caller_that_is_late() -> None:
    """Its deadline is its own."""
    counters, proxy = await made()

    async def late() -> list[Any]:
        with aiorpc.timeout(BEGUN):
            return await take(proxy.wait(1))

    (found,) = await all_of(late())
    assert type(found) is CallTimeout
    await until(counters.closed.is_set)


async def test_one_that_leaves_the_queue() -> None:
    """Before its batch has begun: it is in none."""
    counters, proxy = await made()
    running = aiter(proxy.wait(0))
    assert await anext(running) == 0
    waiting = asyncio.ensure_future(take(proxy.wait(1)))
    await until(lambda: stats().batches["Counters.wait"].waiting)
    waiting.cancel()
    await asyncio.wait([waiting])
    await running.aclose()
    await until(counters.closed.is_set)


# ── how far it runs ahead ───────────────────────────────────────────────────────────────────────


@pytest.mark.promise("batching.generators")
@pytest.mark.parametrize("is_local", [False, True])
@kinds
async def test_a_slow_caller_stops_no_other(kind: str, is_local: bool) -> None:
    """And all its items arrive. Without a caller that takes items the generator stops."""
    counters, proxy = await made(2)
    owner: Any = counters if is_local else proxy
    slow, fast = (aiter(getattr(owner, kind)(600)) for _ in range(2))
    assert await all_of(anext(slow), anext(fast)) == [0, 0]
    assert await all_of(take(fast, 400)) == [[*range(1, 401)]]
    assert counters.steps <= 400 + 4 * STREAM_CREDIT
    rest, more = await all_of(take(slow), take(fast))
    assert rest == [*range(1, 600)]
    assert more == [*range(401, 600)]


async def test_one_that_is_far_behind_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it takes its items, or leaves."""
    monkeypatch.setattr("aiorpc_torch._batching.streams.MAX_BEHIND", STREAM_CREDIT)
    counters, _ = await made(2)
    slow, fast = counters.count(1000), counters.count(1000)
    assert await all_of(anext(slow), anext(fast)) == [0, 0]
    rest = asyncio.ensure_future(take(fast))
    await until(lambda: counters.steps >= 2 * STREAM_CREDIT)
    for _ in range(100):
        await asyncio.sleep(0)
    assert counters.steps <= 2 * STREAM_CREDIT + 2
    assert not rest.done()
    await slow.aclose()
    assert await all_of(rest) == [[*range(1, 1000)]]


# ── as every batch ──────────────────────────────────────────────────────────────────────────────


async def test_of_an_exclusive_object() -> None:
    """It holds the turn until its end."""

    @exclusive
    class One(Counters):
        async def quick(self) -> str:
            return "quick"

    rref = await create("main", One)
    proxy: Any = remote(rref)
    stream = aiter(proxy.wait(1))
    assert await anext(stream) == 1
    quick = asyncio.ensure_future(proxy.quick())
    done, _ = await asyncio.wait([quick], timeout=0.05)
    assert not done
    await stream.aclose()
    assert await all_of(quick) == ["quick"]


async def test_a_wait_that_is_cancelled_loses_nothing() -> None:
    """Of a local stream."""
    gate = asyncio.Event()

    @batched(max_size=2)
    async def body(items: list[int]) -> AsyncIterator[list[int]]:
        await gate.wait()
        yield items

    stream = body(7)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    gate.set()
    assert await take(stream) == [7]


async def test_nothing_is_kept() -> None:
    """Of items and arguments, once a batch is over."""

    class Big:
        pass

    gone: list[Callable[[], Any]] = []

    @batched(max_size=2)
    async def body(items: list[Big]) -> AsyncIterator[list[Big]]:
        made = [Big() for _ in items]
        gone.extend(map(weakref.ref, made))
        yield made
        del made
        yield items

    async def use() -> None:
        big = Big()
        gone.append(weakref.ref(big))
        async for _ in body(big):
            pass

    await all_of(use(), use())
    await asyncio.sleep(0)
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


# ── a thread and a context of its own ───────────────────────────────────────────────────────────

variable: ContextVar[int] = ContextVar("variable", default=0)


class Modes:
    """A plain generator that changes its thread and its context."""

    @batched(max_size=4)
    def generate(self, items: list[int]) -> Iterator[list[Any]]:
        with torch.no_grad(), decimal.localcontext() as context:
            context.prec = 3
            for _ in range(4):
                variable.set(variable.get() + 1)
                third = str(decimal.Decimal(1) / 3)
                yield [(torch.is_grad_enabled(), variable.get(), third)] * len(items)

    def __init__(self) -> None:
        self.gate = threading.Event()

    def plain(self) -> bool:
        assert self.gate.wait(PATIENCE)
        return torch.is_grad_enabled()


@pytest.mark.promise("batching.generators")
async def test_the_modes_of_a_plain_generator_are_its_own() -> None:
    """From step to step, and those of no other plain method, then or later."""
    rref = await create("main", Modes)
    proxy, items = remote(rref), list[Any]()
    others: list[asyncio.Task[bool]] = []
    gate = rref.local_value().gate
    async for item in proxy.generate(1):
        items.append(item)
        others += [asyncio.ensure_future(proxy.plain()) for _ in range(2)]
        await asyncio.sleep(0)
    gate.set()
    assert items == [(False, number, "0.333") for number in range(1, 5)]
    assert await all_of(*others) == [True] * 8
    assert await all_of(*(proxy.plain() for _ in range(8))) == [True] * 8


async def test_a_local_call_that_is_refused() -> None:
    """It is over: the next `anext` does not wait for an item."""

    @batched(max_size=1, max_pending=1)
    async def body(items: list[int]) -> AsyncIterator[list[int]]:
        yield items
        await asyncio.get_running_loop().create_future()

    running, waiting, refused = body(1), body(2), body(3)
    assert await anext(running) == 1
    waits = asyncio.ensure_future(anext(waiting))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await anext(refused)
    assert await all_of(take(refused)) == [[]]
    waits.cancel()
    await asyncio.wait([waits])
    await waiting.aclose()
    await running.aclose()
    await asyncio.sleep(0)


async def test_its_cleanup_is_cancelled_once() -> None:
    """Whoever leaves later, and those that have ended before."""
    cleanup: list[str] = []
    ended = asyncio.Event()

    @batched(max_size=2)
    async def body(items: list[int]) -> AsyncIterator[list[Any]]:
        try:
            yield items
            yield [StopAsyncIteration(), *items[1:]]
            await asyncio.get_running_loop().create_future()
        finally:
            cleanup.append("begins")
            await asyncio.sleep(0.01)
            cleanup.append("ends")
            ended.set()

    one, other = body(1), body(2)
    assert await all_of(take(one), take(other, 2)) == [[1], [2, 2]]
    await other.aclose()
    await asyncio.sleep(0)
    await one.aclose()
    await other.aclose()
    async with asyncio.timeout(PATIENCE):
        await ended.wait()
    assert cleanup == ["begins", "ends"]


async def test_large_items_of_a_slow_local_caller() -> None:
    """They count by their bytes."""
    made: list[int] = []

    @batched(max_size=2)
    async def body(items: list[int]) -> AsyncIterator[list[Tensor]]:
        for number in range(10**6):
            made.append(number)
            yield [torch.zeros(1 << 20, dtype=torch.uint8) for _ in items]

    slow, fast = body(1), body(2)
    assert len(await all_of(anext(slow), anext(fast))) == 2
    rest = asyncio.ensure_future(take(fast))
    for _ in range(500):
        await asyncio.sleep(0)
    assert len(made) < 100  # 64 MiB, and those of the credit
    rest.cancel()
    await asyncio.wait([rest])
    await slow.aclose()
    await fast.aclose()
