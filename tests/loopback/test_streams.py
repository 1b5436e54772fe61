"""Remote generators, iterated: what arrives, how far they run ahead, and how they are closed.

And calls as what they are before they are awaited: coroutines for whoever makes tasks of them.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, NotInWorld, RRef, call, create, remote
from aiorpc_torch.testing import Gate, connection, settled
from aiorpc_torch.testing.limits import BYTES_PER_CREDIT, STREAM_CREDIT
from aiorpc_torch.types import RemoteTraceback
from tests.support import actors
from tests.support.actors import Batching, Counter, Notes, Streams, TwoArguments
from tests.support.consumers import (
    ENDLESS,
    MEGABYTE,
    by_break,
    by_cancelling_the_task,
    by_dropping_it,
    closed,
    iterate,
    streams,
    take,
)
from tests.support.slack import BEGUN

pytestmark = pytest.mark.usefixtures("world")

kinds = pytest.mark.parametrize("kind", ["count", "count_in_thread"])


# ── items ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("streams.order")
@kinds
async def test_items_arrive_in_order(kind: str) -> None:
    """All items arrive, of async and plain generators, also beyond the credit."""
    rref = await streams()
    for number in (0, 1, 10 * STREAM_CREDIT + 7):
        items = [item async for item in getattr(remote(rref), kind)(number)]
        assert items == list(range(number))


@pytest.mark.promise("streams.copied")
@pytest.mark.parametrize("size", [4, 5000])
async def test_a_buffer_that_is_filled_again(size: int) -> None:
    """An item has its value at the time of the yield, whatever its size."""
    items = [item async for item in remote(await streams()).refill(10, size)]
    found = [item if isinstance(item, torch.Tensor) else item["buffer"] for item in items]
    assert [set(item.tolist()) for item in found] == [{float(n)} for n in range(10)]


async def test_any_iterator() -> None:
    """A plain def may return any iterator."""
    assert [item async for item in remote(await streams()).iterator(3)] == ["0", "1", "2"]


@kinds
@pytest.mark.parametrize("size", [1, 100, MEGABYTE])
async def test_tensors(kind: str, size: int) -> None:
    """Small ones and large ones arrive in order, each with its own values."""
    number = 12 if size == MEGABYTE else 100
    rref = await streams()
    items = [item async for item in getattr(remote(rref), kind)(number, size=size)]
    assert len(items) == number
    assert all(torch.equal(item, torch.full((size,), n)) for n, item in enumerate(items))


@pytest.mark.parametrize("function", [actors.count, actors.count_in_thread])
async def test_of_a_function(function: Callable[[int], Any]) -> None:
    """Iterate `call(worker, generator_function, n)`."""
    assert [item async for item in call("main", function, 100)] == list(range(100))


@pytest.mark.parametrize("method", [Streams.count, Streams.count_in_thread])
async def test_of_a_typed_method(method: Callable[[Streams, int], Any]) -> None:
    """Iterate `call(rref, Class.generator, n)`."""
    assert [item async for item in call(await streams(), method, 3)] == [0, 1, 2]


async def test_items_do_not_wait_for_each_other() -> None:
    """An item arrives while the generator waits, whatever else runs."""
    one, two = await streams(), await streams()
    first, second = aiter(remote(one).follow()), aiter(remote(two).follow())
    for n in range(20):
        await asyncio.gather(remote(one).put(n), remote(two).put(-n))
        assert await anext(first) == n
        assert await anext(second) == -n
    await asyncio.gather(remote(one).put(None), remote(two).put(None))
    for stream in (first, second):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@pytest.mark.promise("streams.messages")
@kinds
async def test_streams_share_messages(kind: str) -> None:
    """Thousands of items of many streams travel in few messages."""
    rref = await streams()

    async def consume() -> int:
        return len([item async for item in getattr(remote(rref), kind)(100)])

    before = aiorpc.observe.stats()
    assert await asyncio.gather(*(consume() for _ in range(20))) == [100] * 20
    after = aiorpc.observe.stats()
    assert after.calls - before.calls == 20
    assert after.messages - before.messages < 400, "for 2000 items and 20 ends"
    assert after.in_flight == 0


@pytest.mark.promise("order.start")
async def test_streams_and_calls_start_in_order() -> None:
    """Streams and calls of one caller start in the order of their calls."""
    notes = RRef(Notes())
    started, tasks = [], []
    for n in range(50):
        started.append(aiter(call("main", note_and_yield, notes, 2 * n)))
        tasks.append(asyncio.create_task(remote(notes).note(2 * n + 1)))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert [await anext(stream) for stream in started] == list(range(0, 100, 2))
    assert await remote(notes).noted() == list(range(100))


async def note_and_yield(notes: Any, item: int) -> Any:
    await notes.local_value().note(item)
    yield item


# ── how far they run ahead ──────────────────────────────────────────────────────────────────────


async def made(rref: Any, least: int) -> int:
    """Wait until at least `least` items were made and no more come; return the count."""
    async with asyncio.timeout(30.0):
        while await remote(rref).how_many() < least:
            pass
    for _ in range(20):
        await remote(rref).how_many()
    return await remote(rref).how_many()


@pytest.mark.promise("streams.credit")
@kinds
async def test_producer_is_held_back(kind: str) -> None:
    """The generator runs ahead of its consumer by its credit only."""
    rref = await streams()
    stream = aiter(getattr(remote(rref), kind)(ENDLESS))
    position = 0
    for number in (0, 1, STREAM_CREDIT // 2, 3 * STREAM_CREDIT + 5):
        await take(stream, number - position)
        position = number
        ahead = await made(rref, position + STREAM_CREDIT // 2) - position
        assert ahead <= STREAM_CREDIT
    assert await take(stream, 3) == [position, position + 1, position + 2]


@pytest.mark.promise("streams.credit")
@kinds
async def test_producer_of_large_items_is_held_back_sooner(kind: str) -> None:
    """Credit counts bytes: a few megabytes are in flight, not 64 items."""
    rref = await streams()
    stream = aiter(getattr(remote(rref), kind)(ENDLESS, size=MEGABYTE))
    most = STREAM_CREDIT // (1 + 4 * MEGABYTE // BYTES_PER_CREDIT) + 1
    assert most < 10
    for position in (0, 5, 10):
        assert 1 <= await made(rref, position + 1) - position <= most
        await take(stream, 5)


@pytest.mark.promise("streams.credit")
@kinds
async def test_item_larger_than_the_credit(kind: str) -> None:
    """The item is sent nevertheless, and so are later items."""
    size = 5 * MEGABYTE  # elements of float32
    assert 4 * size > STREAM_CREDIT * BYTES_PER_CREDIT
    rref = await streams()
    items = [item async for item in getattr(remote(rref), kind)(5, size=size)]
    assert [int(item[0]) for item in items] == [0, 1, 2, 3, 4]


# ── how they are closed ─────────────────────────────────────────────────────────────────────────


async def by_an_exception(stream: Any) -> None:
    with contextlib.suppress(LookupError):
        async for _ in stream:
            raise LookupError("in the block")


async def by_aclose(stream: Any) -> None:
    iterator = aiter(stream)
    assert await take(iterator, 2) == [0, 1]
    await iterator.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(iterator)
    await iterator.aclose()


async def by_aclosing(stream: Any) -> None:
    async with contextlib.aclosing(aiter(stream)) as items:
        assert await anext(items) == 0


async def by_dropping_it_in_another_thread(stream: Any) -> None:
    holder = [aiter(stream)]
    assert await anext(holder[0]) == 0
    await asyncio.to_thread(holder.clear)


WAYS = [
    by_break,
    by_an_exception,
    by_aclose,
    by_aclosing,
    by_dropping_it,
    by_dropping_it_in_another_thread,
    by_cancelling_the_task,
]


@pytest.mark.promise("streams.close")
@kinds
@pytest.mark.parametrize("way", WAYS)
async def test_left_before_its_end(kind: str, way: Any) -> None:
    """The generator's `finally` runs however the consumer leaves."""
    rref = await streams()
    await way(getattr(remote(rref), kind)(ENDLESS))
    await closed(rref)
    assert await remote(rref).how_many() <= 3 * STREAM_CREDIT
    assert aiorpc.observe.stats().in_flight == 0


@pytest.mark.promise("streams.close")
async def test_iterator_that_is_never_asked() -> None:
    """The stream was requested, so dropping the iterator closes it."""
    rref = await streams()
    stream = aiter(remote(rref).follow())
    await remote(rref).followed()
    del stream
    assert await closed(rref) == 1


async def test_garbage_changes_no_connection_in_place() -> None:
    """It may be collected while the connection handles another call."""
    rref = await streams()
    stream = aiter(remote(rref).follow())
    await remote(rref).followed()
    before = connection("main").pending
    del stream
    assert connection("main").pending == before
    await asyncio.sleep(0)
    assert connection("main").pending == before - 1


@pytest.mark.promise("streams.close")
async def test_cancelled_while_it_waits_for_an_item() -> None:
    """The generator is cancelled where it waits, and the iterator says so."""
    rref = await streams()
    stream = aiter(remote(rref).follow())
    await remote(rref).put("first")
    assert await anext(stream) == "first"
    waiting = asyncio.create_task(take(stream, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await closed(rref) == 1
    with pytest.raises(RuntimeError, match="a wait for its next item was cancelled"):
        await anext(stream)


async def test_closed_while_another_task_waits() -> None:
    """The waiting task gets the end of the stream."""
    rref = await streams()
    stream = aiter(remote(rref).follow())
    waiting = asyncio.create_task(iterate(stream))
    await remote(rref).followed()
    await stream.aclose()
    assert await waiting == []
    assert await closed(rref) == 1


async def test_end_is_told_again() -> None:
    """Every `anext` after the end raises StopAsyncIteration."""
    stream = aiter(call("main", actors.count, 1))
    assert await anext(stream) == 0
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert repr(stream) == "<stream of count>"


# ── exceptions and deadlines ────────────────────────────────────────────────────────────────────


@pytest.mark.promise("streams.exception")
@pytest.mark.parametrize("kind", ["fail_at", "fail_in_thread_at"])
async def test_exception_comes_after_the_items(kind: str) -> None:
    """The exception has its own class and the remote traceback; then the stream ends."""
    rref = await streams()
    for number in (0, 3, STREAM_CREDIT + 1):
        stream = aiter(getattr(remote(rref), kind)(number, TwoArguments, 7, "mid-stream"))
        assert await take(stream, number) == list(range(number))
        with pytest.raises(TwoArguments) as raised:
            await anext(stream)
        assert raised.value.code == 7
        assert isinstance(raised.value.__cause__, RemoteTraceback)
        assert "raise exc" in raised.value.__cause__.text
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@pytest.mark.parametrize("kind", ["unpicklable_at", "unpicklable_in_thread_at"])
async def test_item_that_cannot_be_pickled(kind: str) -> None:
    """The stream ends after the items before it, and the generator is closed."""
    rref = await streams()
    stream = aiter(getattr(remote(rref), kind)(2))
    assert await take(stream, 2) == [0, 1]
    with pytest.raises(TypeError, match="pickle") as raised:
        await anext(stream)
    assert raised.value.__notes__ == [f"(while pickling an item of Streams.{kind})"]
    await closed(rref)


@pytest.mark.promise("streams.timeout")
async def test_timeout_of_a_stream() -> None:
    """`remote(..., timeout=)` bounds the whole stream: items, then CallTimeout."""
    rref = await streams()
    await remote(rref).put("first")
    stream = aiter(remote(rref, timeout=BEGUN).follow())
    assert await anext(stream) == "first"
    with pytest.raises(CallTimeout, match="on worker 'main' timed out"):
        await anext(stream)
    assert await closed(rref) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_items_that_came_in_time_are_read_after_it() -> None:
    """A slow consumer loses no items."""
    rref = await streams()
    stream = aiter(remote(rref, timeout=2 * BEGUN).count(ENDLESS))
    assert await made(rref, STREAM_CREDIT) == STREAM_CREDIT
    await closed(rref)  # by the deadline
    assert await take(stream, STREAM_CREDIT) == list(range(STREAM_CREDIT))
    with pytest.raises(CallTimeout):
        await anext(stream)


async def test_timeout_of_a_block() -> None:
    """`aiorpc.timeout` bounds a stream like a call."""
    rref = await streams()
    with aiorpc.timeout(BEGUN), pytest.raises(CallTimeout):
        await iterate(remote(rref).follow())
    assert await closed(rref) == 1
    with aiorpc.timeout(0.0), pytest.raises(CallTimeout, match="before the call"):
        await iterate(remote(rref).follow())


async def test_scope_around_a_stream() -> None:
    """anyio's `move_on_after` ends the stream silently, and closes the generator."""
    rref = await streams()
    with anyio.move_on_after(BEGUN) as scope:
        await iterate(remote(rref).follow())
    assert scope.cancelled_caught
    assert await closed(rref) == 1


# ── mistakes ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("streams.misuse")
@kinds
async def test_awaiting_a_stream(kind: str) -> None:
    """The error names `async for`."""
    with pytest.raises(TypeError, match="a generator; use `async for`"):
        await getattr(remote(await streams()), kind)(1)


@pytest.mark.promise("streams.misuse")
@pytest.mark.parametrize("kind", ["a_list", "a_list_in_thread"])
async def test_iterating_a_call(kind: str) -> None:
    """The error names `await`."""
    with pytest.raises(TypeError, match="is not a generator, it returned list: use `await`"):
        await iterate(getattr(remote(await streams()), kind)())


async def test_iterating_a_batched_call_or_a_future() -> None:
    """These raise too, and are not taken for empty streams."""
    with pytest.raises(TypeError, match="use `await`, not `async for`"):
        await iterate(remote(RRef(Batching())).double(1))
    with pytest.raises(TypeError, match="use `await`, not `async for`"):
        await iterate(remote(RRef(Counter())).later())


async def test_iterating_what_is_not_there() -> None:
    """The first item raises the exception of a call."""
    rref = await streams()
    with pytest.raises(AttributeError, match="nope"):
        await iterate(remote(rref).nope())
    with pytest.raises(TypeError, match="missing"):
        await iterate(remote(rref).count())
    with pytest.raises(TypeError, match="pickle"):
        await iterate(remote(rref).count(n for n in ()))


# ── calls as coroutines ─────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("calls.lazy")
async def test_a_call_that_is_never_awaited() -> None:
    """Python's own warning names the method; nothing is sent."""
    rref = await create("main", Counter)
    sent = aiorpc.observe.stats().calls
    with pytest.warns(RuntimeWarning, match=r"add.* was never awaited"):
        remote(rref).add()
    assert aiorpc.observe.stats().calls == sent
    remote(rref).add().close()  # who says that it is not wanted is not warned


async def test_a_call_is_awaited_once() -> None:
    """A second `await`, or `await` after `async for`, raises."""
    rref = await create("main", Counter)
    called = remote(rref).aadd()
    assert await called == 1
    with pytest.raises(RuntimeError, match="awaited already"):
        await called
    with pytest.raises(RuntimeError, match="awaited already"):
        await asyncio.create_task(called)
    with pytest.raises(RuntimeError, match="awaited already"):
        aiter(called)
    stream = call("main", actors.count, 1)
    assert await iterate(stream) == [0]
    with pytest.raises(RuntimeError, match="awaited already"):
        await stream
    with pytest.raises(RuntimeError, match="awaited already"):
        await asyncio.create_task(stream)
    assert await remote(rref).aadd() == 2
    failing = call("no worker", actors.count, 1)
    with pytest.raises(aiorpc.UnknownWorker):
        await asyncio.create_task(failing)
    with pytest.raises(RuntimeError, match="awaited already"):
        await asyncio.create_task(failing)


@pytest.mark.promise("calls.task_groups")
async def test_asyncio_takes_calls() -> None:
    """Calls work with tasks, gather, wait_for, wait, timeout and task groups."""
    rref, gate = await create("main", Counter), await create("main", Gate)
    assert await asyncio.create_task(remote(rref).aadd(), name="mine") == 1
    assert await asyncio.gather(*(remote(rref).aadd() for _ in range(3))) == [2, 3, 4]
    assert await asyncio.wait_for(remote(rref).aadd(), 10.0) == 5
    assert await asyncio.shield(remote(rref).aadd()) == 6
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(remote(rref).aadd()) for _ in range(2)]
    assert [task.result() for task in tasks] == [7, 8]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(remote(gate).passed(), BEGUN)
    assert await remote(gate).cancelled() == 1


@pytest.mark.promise("calls.task_groups")
async def test_a_failing_group_cancels_its_calls() -> None:
    """One call fails, and the callee cancels the other."""
    gate = await create("main", Gate)
    with pytest.raises(ExceptionGroup) as raised:  # noqa: PT012
        async with asyncio.TaskGroup() as group:
            group.create_task(remote(gate).passed())
            await remote(gate).entered()
            group.create_task(call("main", actors.araise_it, TwoArguments, 1, "one"))
    assert raised.group_contains(TwoArguments)
    assert await remote(gate).cancelled() == 1


@pytest.mark.promise("calls.task_groups")
async def test_anyio_takes_calls() -> None:
    """Task groups start a method directly; scopes cancel it."""
    rref, gate = await create("main", Counter), await create("main", Gate)
    async with anyio.create_task_group() as group:
        group.start_soon(remote(rref).aadd, 2)
        group.start_soon(remote(rref).add, 3)
    assert await remote(rref).aadd(0) == 5
    async with anyio.create_task_group() as group:
        group.start_soon(remote(gate).passed)
        await remote(gate).entered()
        group.cancel_scope.cancel()
    assert await remote(gate).cancelled() == 1


@pytest.mark.promise("calls.lazy")
async def test_a_task_cancelled_before_it_starts_sends_nothing() -> None:
    """Nothing is sent, and Python does not warn."""
    rref = await create("main", Counter)
    task = asyncio.create_task(remote(rref).aadd())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await remote(rref).aadd() == 1


# ── the end of a world ──────────────────────────────────────────────────────────────────────────


class TestLeaving:
    """Streams in worlds of their own."""

    @pytest.fixture
    def world(self) -> None:
        """Use no shared world."""

    @pytest.mark.promise("streams.worlds_end")
    @pytest.mark.parametrize("kind", ["count", "count_in_thread", "follow"])
    async def test_streams_end_with_their_world(
        self, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The generator is closed, the consumer gets an error, and nothing is logged."""
        source = Streams()
        async with aiorpc.local_world(0):
            rref = RRef(source)
            args = () if kind == "follow" else (ENDLESS,)
            stream = aiter(getattr(remote(rref), kind)(*args))
            await (remote(rref).followed() if kind == "follow" else take(stream, 1))
            del rref
        assert await asyncio.to_thread(source.closed) == (kind == "follow")
        with pytest.raises(NotInWorld):
            await iterate(stream)
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING], caplog.text


@pytest.mark.usefixtures("world")
async def test_two_tasks_cannot_wait_for_one_item() -> None:
    """The second raises, the first gets its item, and the stream goes on."""
    follower = await create("main", Streams)
    items = aiter(remote(follower).follow())
    first = asyncio.create_task(anext(items))
    await remote(follower).followed()
    with pytest.raises(RuntimeError, match="another task"):
        await anext(items)
    await remote(follower).put(1)
    assert await first == 1
    await remote(follower).put(2)
    assert await anext(items) == 2
    await items.aclose()


CREDIT = 64  # items that a generator may be ahead of its consumer


def count(most: int) -> Iterator[int]:
    yield from range(most)


async def count_async(most: int) -> AsyncIterator[int]:
    for number in range(most):
        yield number


@pytest.mark.parametrize("function", [count, count_async])
async def test_every_item_arrives_in_order(function: Any) -> None:
    """Many times the credit."""
    async with asyncio.timeout(30.0):
        found = [item async for item in call("main", function, 5 * CREDIT)]
    assert found == [*range(5 * CREDIT)]
    async with asyncio.timeout(30.0):
        await settled()


async def test_what_cannot_be_iterated() -> None:
    with pytest.raises(TypeError, match="abs is not a generator, it returned int: use `await`"):
        async for _ in call("main", abs, -1):
            pass
