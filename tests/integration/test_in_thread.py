"""`in_thread`: a world on an event loop in a thread, for synchronous code and notebooks."""

import asyncio
import contextlib
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from aiorpc_torch import (
    CallTimeout,
    Group,
    RRef,
    call,
    create,
    in_thread,
    local_world,
    remote,
    seconds_left,
    timeout,
)
from aiorpc_torch.testing import Gate
from aiorpc_torch.types import LocalWorker, WorkerThread
from tests.support.slack import SLACK

LONG = 60.0


class Counter:
    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.closed = 0

    async def add(self, amount: int) -> int:
        self.number += amount
        return self.number

    async def items(self, count: int) -> AsyncIterator[int]:
        try:
            for item in range(count):
                yield item
        finally:
            self.closed += 1

    async def failing(self, count: int) -> AsyncIterator[int]:
        for item in range(count):
            yield item
        raise LookupError("after them")

    async def has_closed(self) -> int:
        return self.closed

    async def large(self, count: int) -> AsyncIterator[torch.Tensor]:
        for item in range(count):
            yield torch.full((1 << 16,), float(item))


@pytest.fixture(scope="module")
def me() -> Iterator[WorkerThread[LocalWorker]]:
    with in_thread(local_world(["a", "b"])) as me:
        yield me


@pytest.fixture
def counter(me: WorkerThread[LocalWorker]) -> RRef[Counter]:
    return me.run(create, "a", Counter)


# ── calls ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("worlds.in_thread")
def test_run_takes_awaitables_and_functions(
    me: WorkerThread[LocalWorker], counter: RRef[Counter]
) -> None:
    """A call, a coroutine, a coroutine function, a plain function, a method of the worker."""
    assert me.run(remote(counter).add(1)) == 1
    assert me.run(remote(counter).add, 1) == 2
    assert me.run(call(counter, Counter.add, 1)) == 3
    assert me.run(call, counter, Counter.add, 1) == 4
    assert me.run(twice(counter, 1)) == 6
    assert me.run(twice, counter, 1) == 8
    assert me.run(len, [1, 2]) == 2
    group = me.run(create(["a", "b"], Counter, 5))
    assert me.run(remote(group).add(1)) == [6, 6]
    assert (me.name, me.rank, me.peers, me.world_size) == ("main", 0, ("a", "b"), 3)
    assert me.worker.name == "main"


async def twice(counter: RRef[Counter], amount: Any) -> int:
    await remote(counter).add(amount)
    return await remote(counter).add(amount)  # type: ignore[no-any-return]


def test_a_future_of_another_loop(me: WorkerThread[LocalWorker], counter: RRef[Counter]) -> None:
    """What `asyncio.gather` returns in the cell of a notebook, which has a loop of its own."""

    async def cell() -> list[int]:
        gathered = asyncio.gather(remote(counter).add(1), remote(counter).add(1))
        with pytest.raises(RuntimeError, match=r"make the calls in an `async def.*`run\(main\)`$"):
            me.run(gathered)
        return await gathered

    assert asyncio.run(cell()) == [1, 2]


@pytest.mark.promise("worlds.in_thread")
def test_errors_and_mistakes(me: WorkerThread[LocalWorker], counter: RRef[Counter]) -> None:
    """What is raised arrives as itself; a mistake says what `run` takes."""
    with pytest.raises(TypeError, match="unsupported operand"):
        me.run(remote(counter).add("x"))
    untyped: Any = me
    for wrong in (3, None, counter):
        with pytest.raises(TypeError, match="takes an awaitable, or a function"):
            untyped.run(wrong)
    waiting = remote(counter).add(1)
    with pytest.raises(TypeError, match="takes an awaitable, or a function"):
        untyped.run(waiting, 1)
    me.run(waiting)
    with pytest.raises(TypeError, match=r"and iterate\(\) a stream"):
        untyped.run(local(1))
    with pytest.raises(TypeError, match=r"a generator; .* in synchronous code `me.iterate`"):
        untyped.run(remote(counter).items(1))
    with pytest.raises(TypeError, match="takes what `async for` takes"):
        untyped.iterate([1, 2])
    with pytest.raises(AttributeError, match="nothing"):
        untyped.nothing  # noqa: B018


def test_an_error_shows_the_lines_of_run_alone(
    me: WorkerThread[LocalWorker], counter: RRef[Counter]
) -> None:
    """None of the task in the other thread, before the user's own lines."""
    with pytest.raises(TypeError, match="unsupported operand") as error:
        me.run(twice, counter, "x")
    names = [each.name for each in traceback.extract_tb(error.tb)]
    assert names[names.index("twice") - 1] == "__get_result"  # of `concurrent.futures`
    with pytest.raises(AttributeError, match="nope") as error:
        me.run(remote(counter).nope())
    assert traceback.extract_tb(error.tb)[-1].name == "__get_result"


@pytest.mark.promise("worlds.in_thread")
def test_a_deadline_bounds_what_runs(me: WorkerThread[LocalWorker], counter: RRef[Counter]) -> None:
    """Around `run`, in this thread: calls, other waits, and streams."""
    gate = me.run(create("a", Gate))
    with pytest.raises(CallTimeout), timeout(SLACK / 4):
        me.run(remote(gate).passed())
    begin = time.monotonic()
    with pytest.raises(TimeoutError), timeout(0.05):
        me.run(asyncio.sleep, LONG)
    with pytest.raises(TimeoutError), timeout(0.05):
        next(me.iterate(endless()))
    assert time.monotonic() - begin < LONG / 2
    assert me.run(remote(gate).cancelled()) == 1


async def endless() -> AsyncIterator[int]:
    await asyncio.Event().wait()
    yield 1


def test_threads_side_by_side(me: WorkerThread[LocalWorker], counter: RRef[Counter]) -> None:
    """Each waits for its own."""
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(me.run(remote(counter).add(1))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [*range(1, 9)]


def test_its_own_loop_is_not_blocked(me: WorkerThread[LocalWorker], counter: RRef[Counter]) -> None:
    """`run` and `iterate` inside of the loop raise, and say what to write."""

    async def inside() -> list[str]:
        told = []
        for ask in (lambda: me.run(asyncio.sleep(0)), lambda: next(me.iterate(endless()))):
            with pytest.raises(RuntimeError, match="use `await` there") as raised:
                ask()
            told.append(str(raised.value))
        return told

    assert len(me.run(inside)) == 2


# ── streams ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("worlds.in_thread")
def test_streams_are_plain_iterators(me: WorkerThread[LocalWorker], counter: RRef[Counter]) -> None:
    """Remote ones, maps, calls of groups, changes of the world, generators of this process."""
    assert [*me.iterate(remote(counter).items(1000))] == [*range(1000)]
    assert [int(each[0]) for each in me.iterate(remote(counter).large(5))] == [*range(5)]
    group: Group[Counter] = me.run(create(["a", "b"], Counter))
    assert len([*me.iterate(group.map(Counter.add, [1] * 20))]) == 20
    assert sum(result for _, result in me.iterate(remote(group).add(0))) == 20
    assert [*me.iterate(local(3))] == [0, 1, 2]
    me.run(me.start("c"))
    assert me.peers == ("a", "b", "c")
    me.run(me.worker.stop, "c")
    assert me.peers == ("a", "b")


async def local(count: int) -> AsyncIterator[int]:
    for item in range(count):
        yield item


@pytest.mark.promise("worlds.in_thread")
def test_a_stream_that_is_left_early_is_closed(
    me: WorkerThread[LocalWorker], counter: RRef[Counter]
) -> None:
    """By `break`, and when its iterator is dropped."""
    for item in me.iterate(remote(counter).items(1_000_000)):
        if item == 100:
            break
    stream = me.iterate(remote(counter).items(1_000_000))
    assert next(stream) == 0
    del stream
    deadline = time.monotonic() + LONG
    while me.run(remote(counter).has_closed()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stream_that_cannot_begin(me: WorkerThread[LocalWorker], counter: RRef[Counter]) -> None:
    """Its loop raises what `async for` would; nothing waits for items."""
    used = remote(counter).items(1)
    assert [*me.iterate(used)] == [0]
    with timeout(LONG):
        with pytest.raises(RuntimeError, match="was awaited already"):
            next(me.iterate(used))
        late = remote(counter).items(1)
        with pytest.raises(CallTimeout, match="it was not sent"), timeout(-1.0):
            next(me.iterate(late))


class Fixed(Exception):
    """None of its attributes can be set."""

    def __setattr__(self, name: str, value: object) -> None:
        raise ZeroDivisionError(name)


def test_an_exception_that_cannot_be_changed(me: WorkerThread[LocalWorker]) -> None:
    async def fail() -> None:
        raise Fixed

    async def items() -> AsyncIterator[int]:
        yield 1
        raise Fixed

    with timeout(LONG):
        with pytest.raises(Fixed):
            me.run(fail)
        stream = me.iterate(items())
        assert next(stream) == 1
        with pytest.raises(Fixed):
            next(stream)


def test_tasks_that_other_code_cancels(me: WorkerThread[LocalWorker]) -> None:
    """Before their first step, or between two items. Each wait for them ends."""

    async def items() -> AsyncIterator[int]:
        for item in range(3):
            yield item

    def cancel_all() -> None:
        for task in asyncio.all_tasks():
            if task.get_name() in ("aiorpc-iterate", "aiorpc-run"):
                task.cancel()

    async def answer() -> int:
        return 42

    loop = me.run(asyncio.get_running_loop)
    stream = me.iterate(items())
    assert next(stream) == 0
    loop.call_soon_threadsafe(cancel_all)
    with pytest.raises(asyncio.CancelledError):
        next(stream)
    for step in (lambda: me.run(answer), lambda: next(me.iterate(items()))):
        # The loop gets both while it stands, so the step and the cancellation are in one iteration.
        loop.call_soon_threadsafe(time.sleep, 0.2)
        later = threading.Timer(0.1, loop.call_soon_threadsafe, (cancel_all,))
        later.start()
        with pytest.raises(asyncio.CancelledError):
            step()
        later.join()
    assert me.run(answer) == 42


def test_a_failure_comes_after_the_items(
    me: WorkerThread[LocalWorker], counter: RRef[Counter]
) -> None:
    """Also if they have come together."""
    found = []
    stream = me.iterate(remote(counter).failing(5))
    with contextlib.suppress(LookupError):
        while True:
            found.append(next(stream))
    assert found == [*range(5)]
    assert [*stream] == []


def test_no_item_is_taken_before_it_is_asked_for(me: WorkerThread[LocalWorker]) -> None:
    """Of a stream of this process, which may have effects."""
    taken: list[int] = []

    async def noting() -> AsyncIterator[int]:
        for item in range(10):
            taken.append(item)
            yield item

    stream = me.iterate(noting())
    assert taken == []
    assert [next(stream), next(stream)] == [0, 1]
    assert taken == [0, 1]


async def in_a_block(count: int, seconds: float, wait: float) -> AsyncIterator[int]:
    with timeout(seconds):
        for item in range(count):
            yield item
        await asyncio.sleep(wait)


@pytest.mark.promise("worlds.in_thread")
def test_a_generator_keeps_its_own_block(me: WorkerThread[LocalWorker]) -> None:
    """All of its steps run in one task: a block of `timeout` around them bounds them."""
    assert [*me.iterate(in_a_block(3, LONG, 0))] == [0, 1, 2]
    stream, found = me.iterate(in_a_block(3, 0.05, LONG)), []
    with pytest.raises(TimeoutError):
        found.extend(stream)
    assert next(stream, None) is None
    with timeout(LONG):  # of this thread, around the steps of another one
        assert [*me.iterate(in_a_block(3, LONG, 0))] == [0, 1, 2]
    assert me.run(seconds_left_there) is None


async def seconds_left_there() -> float | None:
    return seconds_left()


def test_a_cancellation_of_its_own(me: WorkerThread[LocalWorker]) -> None:
    """What runs may end as cancelled although the world lives."""

    async def cancelled() -> None:
        raise asyncio.CancelledError("by itself")

    async def items() -> AsyncIterator[int]:
        yield 1
        await cancelled()

    with pytest.raises(asyncio.CancelledError, match="by itself"):
        me.run(cancelled)
    stream = me.iterate(items())
    assert next(stream) == 1
    with pytest.raises(asyncio.CancelledError, match="by itself"):
        next(stream)
    assert me.run(len, []) == 0
