"""`@max_concurrency` and `is_cancelled`: how many calls run at once, and whether one is wanted."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, Group, RRef, batched, create, remote
from aiorpc_torch.observe import stats
from tests.support.raw_connections import SOON
from tests.support.slack import BEGUN


class Gated:
    """Notes in which order its calls start, and how many are inside; each waits for its gate."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.inside = self.most = 0
        self.gates: dict[Any, asyncio.Event] = {}

    async def pass_(self, item: Any) -> Any:
        self.started.append(item)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.gates.setdefault(item, asyncio.Event()).wait()
        finally:
            self.inside -= 1
        return item

    def let(self, *items: Any) -> None:
        for item in items:
            self.gates.setdefault(item, asyncio.Event()).set()


@aiorpc.max_concurrency(2)
class Limited(Gated):
    async def two(self, item: Any) -> list[Any]:
        return [await self.pass_(item), await self.pass_(item)]

    async def ask(self, rref: "RRef[Limited]", depth: int) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            return depth and 1 + await remote(rref).ask(rref, depth - 1)
        finally:
            self.inside -= 1

    async def items(self, name: str) -> AsyncIterator[str]:
        self.started.append(name)
        yield name
        await self.gates.setdefault(name, asyncio.Event()).wait()

    @batched(max_size=8)
    async def batch(self, items: list[int]) -> list[int]:
        await self.pass_("batch")
        return items


class OneMethod(Gated):
    @aiorpc.max_concurrency(2)
    async def slow(self, item: Any) -> Any:
        return await super().pass_(item)

    @aiorpc.max_concurrency(3)
    def compute(self, meet: int) -> int:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.barrier.wait(SOON)
        with self.lock:
            self.inside -= 1
        return meet

    def prepare(self) -> None:
        self.lock, self.barrier = threading.Lock(), threading.Barrier(3)


async def until_started(own: Gated, count: int) -> None:
    async with asyncio.timeout(SOON):
        while len(own.started) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("world")
@pytest.mark.promise("limits.at_once")
async def test_a_class_with_a_limit() -> None:
    """All its methods together, coroutines that this process awaits too. Waiting ones in order."""
    own = Limited()
    rref = RRef(own)
    calls = [asyncio.create_task(remote(rref).pass_(n)) for n in range(4)]
    await until_started(own, 2)
    calls.append(asyncio.create_task(own.pass_(4)))
    calls.append(asyncio.create_task(remote(rref).two(5)))
    await settle()
    assert own.started == [0, 1]
    own.let(1)
    await until_started(own, 3)
    await settle()
    assert own.started == [0, 1, 2]
    own.let(*range(6))
    assert await asyncio.gather(*calls) == [0, 1, 2, 3, 4, [5, 5]]
    assert own.started[:4] == [0, 1, 2, 3]
    assert sorted(own.started[4:]) == [4, 5, 5]  # one of this process starts an iteration later
    assert own.most == 2


@pytest.mark.usefixtures("world")
@pytest.mark.promise("limits.at_once")
async def test_a_method_with_a_limit() -> None:
    """It alone, a coroutine or a plain `def`; the others go on."""
    own = OneMethod()
    rref = RRef(own)
    calls = [asyncio.create_task(remote(rref).slow(n)) for n in range(3)]
    await until_started(own, 2)
    calls.append(asyncio.create_task(own.slow(3)))
    assert await remote(rref).let(0) is None
    await until_started(own, 3)
    await settle()
    assert own.started == [0, 1, 2]
    own.let(1, 2, 3)
    assert await asyncio.gather(*calls) == [0, 1, 2, 3]
    own.prepare()
    own.most = 0
    computed = [remote(rref).compute(n) for n in range(9)]
    assert await asyncio.gather(*computed) == [*range(9)]
    assert own.most == 3


@pytest.mark.usefixtures("world")
@pytest.mark.promise("limits.at_once")
async def test_streams_batches_and_groups_have_turns() -> None:
    own = Limited()
    rref = RRef(own)
    stream = aiter(remote(rref).items("stream"))
    assert await anext(stream) == "stream"
    batch = asyncio.create_task(remote(rref).batch(7))
    await until_started(own, 2)
    group = asyncio.ensure_future(remote(Group([rref, rref])).pass_("group"))
    await settle()
    assert own.started == ["stream", "batch"]
    own.let("stream")
    assert [each async for each in stream] == []
    await until_started(own, 3)
    own.let("batch", "group")
    assert await batch == 7
    assert await group == ["group", "group"]
    assert own.most == 2


@pytest.mark.usefixtures("world")
@pytest.mark.promise("limits.at_once")
async def test_calls_that_leave_while_they_wait() -> None:
    """Cancelled, or late; the others keep their order."""
    rref = await create(0, Limited)
    own = rref.local_value()
    first = [asyncio.create_task(remote(rref).pass_(n)) for n in range(2)]
    await until_started(own, 2)
    cancelled = asyncio.create_task(remote(rref).pass_("cancelled"))
    late = asyncio.create_task(remote(rref, timeout=0.05).pass_("late"))
    last = asyncio.create_task(remote(rref).pass_("last"))
    await settle()
    cancelled.cancel()
    with pytest.raises(CallTimeout):
        await late
    await aiorpc.call(0, int)  # the cancellations have come before it
    await settle()
    own.let(0, "last")
    assert await last == "last"
    own.let(1)
    assert await asyncio.gather(*first) == [0, 1]
    assert own.started == [0, 1, "last"]


@pytest.mark.usefixtures("world")
@pytest.mark.promise("limits.nested")
async def test_calls_of_an_object_by_itself() -> None:
    """They pass those that wait. As many as there are turns are no deadlock, and more an error."""
    own = Limited()
    rref = RRef(own)
    assert await remote(rref).ask(rref, 1) == 1
    with pytest.raises(RuntimeError, match="calls itself, from all 2 calls"):
        await remote(rref).ask(rref, 2)
    assert own.most == 2
    held = asyncio.create_task(remote(rref).pass_("held"))
    await until_started(own, 1)
    nested = asyncio.create_task(remote(rref).ask(rref, 1))
    waiting = asyncio.create_task(remote(rref).pass_("waiting"))
    await settle()
    assert not nested.done()
    own.let("held")
    assert await nested == 1
    own.let("waiting")
    assert await asyncio.gather(held, waiting) == ["held", "waiting"]
    assert own.most == 2


@pytest.mark.promise("limits.at_once")
@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=12))
def test_never_more_at_once_and_in_order(limit: int, steps: list[int]) -> None:
    """Coroutines of one object, each of which takes some iterations."""

    @aiorpc.max_concurrency(limit)
    class Own:
        inside = most = 0

        def __init__(self) -> None:
            self.started: list[int] = []

        async def work(self, n: int, steps: int) -> int:
            self.started.append(n)
            self.inside += 1
            self.most = max(self.most, self.inside)
            for _ in range(steps):
                await asyncio.sleep(0)
            self.inside -= 1
            return n

    async def main() -> None:
        own = Own()
        found = await asyncio.gather(*(own.work(n, count) for n, count in enumerate(steps)))
        assert found == own.started == [*range(len(steps))]
        assert own.most <= min(limit, len(steps))

    asyncio.run(main())


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "2", None])
def test_limits_that_are_none(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"max_concurrency takes an int of at least 1, got"):
        aiorpc.max_concurrency(limit)


def test_what_cannot_be_limited() -> None:
    """At the decoration, with the remedy."""

    def function() -> None: ...

    with pytest.raises(TypeError, match="decorates a class or a method"):
        aiorpc.max_concurrency(2)(function)
    with pytest.raises(TypeError, match=r"use batched\(max_concurrent_batches=\)"):

        class _Batched:
            @aiorpc.max_concurrency(2)
            @batched(max_size=2)
            def f(self, xs: list[int]) -> list[int]:
                return xs

    with pytest.raises(TypeError, match=r"g has max_concurrency: use batched\(max_concurrent"):

        class _Limited:
            @batched(max_size=2)
            @aiorpc.max_concurrency(2)
            def g(self, xs: list[int]) -> list[int]:
                return xs

    with pytest.raises(TypeError, match="_Twice has a limit already"):

        @aiorpc.max_concurrency(2)
        @aiorpc.exclusive
        class _Twice: ...

    with pytest.raises(TypeError, match=r"needs a number: @max_concurrency\(4\)"):

        @aiorpc.max_concurrency  # type: ignore[arg-type]
        class _Bare: ...

    with pytest.raises(TypeError, match="f cannot have a limit of its own"):

        @aiorpc.exclusive
        class _Both:
            @aiorpc.max_concurrency(2)
            async def f(self) -> None: ...

    with pytest.raises(TypeError, match="add '__weakref__' to the __slots__"):

        @aiorpc.max_concurrency(2)
        class _Slots:
            __slots__ = ()


# ── is_cancelled ────────────────────────────────────────────────────────────────────────────────


class Long:
    """Plain `def`s that go on until nobody wants their result."""

    def __init__(self) -> None:
        self.began, self.ended = threading.Event(), threading.Event()
        self.goes_on = threading.Event()

    def work(self) -> None:
        assert not aiorpc.is_cancelled()
        self.began.set()
        self._work()

    def _work(self) -> None:
        while not aiorpc.is_cancelled():
            threading.Event().wait(0.001)
        self.ended.set()

    def items(self) -> Any:
        yield 1
        self.work()

    @batched(max_size=2, max_wait=SOON)
    def batch(self, xs: list[int]) -> list[int]:
        self.work()
        return xs

    def check(self) -> bool:
        return aiorpc.is_cancelled()


@pytest.mark.usefixtures("world")
@pytest.mark.promise("limits.given_up")
@pytest.mark.parametrize("how", ["cancel", "deadline", "stream"])
async def test_a_plain_def_knows_that_nobody_waits(how: str) -> None:
    rref = await create(0, Long)
    own: Long = rref.local_value()
    if how == "deadline":
        with pytest.raises(CallTimeout):
            await remote(rref, timeout=BEGUN).work()
    else:
        items = aiter(remote(rref).items())
        if how == "stream":
            assert await anext(items) == 1
        task = asyncio.ensure_future(anext(items) if how == "stream" else remote(rref).work())
        assert await asyncio.to_thread(own.began.wait, SOON)
        task.cancel()
        await asyncio.wait([task])
        await items.aclose()  # type: ignore[attr-defined]
    assert await asyncio.to_thread(own.ended.wait, SOON)
    assert await remote(rref).check() is False
    async with asyncio.timeout(SOON):
        while stats().running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.usefixtures("world")
@pytest.mark.promise("limits.given_up")
async def test_a_batch_is_wanted_while_one_caller_waits() -> None:
    rref = await create(0, Long)
    own: Long = rref.local_value()
    calls = [asyncio.ensure_future(remote(rref).batch(n)) for n in range(2)]
    assert await asyncio.to_thread(own.began.wait, SOON)
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    await remote(rref).check()  # the cancellation has arrived before it
    assert not own.ended.is_set()
    calls[1].cancel()
    assert await asyncio.to_thread(own.ended.wait, SOON)


def test_outside_a_call() -> None:
    assert aiorpc.is_cancelled() is False
    assert Long().check() is False
