"""`@exclusive` for calls of every kind: never two at once, in order, and no place is lost."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, async_execution, autograd, batched, call, remote
from aiorpc_torch.testing import Gate
from tests.support.unchecked_calls import fetched

pytestmark = pytest.mark.usefixtures("world")


class Actor:
    """Methods of every kind; each asserts that no other runs."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.log: list[Any] = []
        self.gate = Gate()

    def __getstate__(self) -> Any:
        self.begin("fetch")
        self.end()
        return {"log": self.log}

    def begin(self, item: Any) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.log.append(item)

    def end(self) -> None:
        self.inside -= 1

    async def work(self, item: Any) -> Any:
        self.begin(item)
        try:
            await asyncio.sleep(0)
        finally:
            self.end()
        return item

    def compute(self, item: Any) -> Any:
        self.begin(item)
        torch.ones(100, 100).sum()
        self.end()
        return item

    def plain_coroutine(self, item: Any) -> Any:
        return self.work(item)

    async def items(self, item: Any, count: int = 3) -> AsyncIterator[Any]:
        self.begin(item)
        try:
            for n in range(count):
                await asyncio.sleep(0)
                yield n
        finally:
            self.end()

    def items_in_thread(self, item: Any, count: int = 3) -> Iterator[Any]:
        self.begin(item)
        try:
            yield from range(count)
        finally:
            self.end()

    @batched(max_size=4)
    async def batch(self, items: list[Any]) -> list[Any]:
        self.begin(("batch", *items))
        await asyncio.sleep(0)
        self.end()
        return items

    @batched(max_size=4)
    def batch_in_thread(self, items: list[Any]) -> list[Any]:
        self.begin(("batch", *items))
        self.end()
        return items

    async def fail(self, item: Any) -> None:
        self.begin(item)
        self.end()
        raise LookupError(item)

    async def hold(self, item: Any) -> Any:
        self.begin(item)
        try:
            await self.gate.passed()
        finally:
            self.end()
        return item

    def hold_in_thread(self, item: Any) -> Any:
        self.begin(item)
        self.gate.passed_in_thread()
        self.end()
        return item

    async def hold_stream(self, item: Any) -> AsyncIterator[Any]:
        self.begin(item)
        try:
            yield item
            await self.gate.passed()
        finally:
            self.end()

    async def linger(self, item: Any) -> None:
        """Take a while to end after a cancellation."""
        self.begin(item)
        try:
            await asyncio.Event().wait()
        finally:
            await self.gate.passed()
            self.end()

    async def ask(self, rref: Any, name: str, *args: Any) -> Any:
        return await getattr(remote(rref), name)(*args)

    def ask_in_thread(self, rref: Any, name: str, *args: Any) -> Any:
        return asyncio.run(self.ask(rref, name, *args))

    async def take(self, rref: Any, name: str, *args: Any) -> list[Any]:
        return [item async for item in getattr(remote(rref), name)(*args)]

    @async_execution
    async def for_torch(self, item: Any) -> Any:
        return await self.work(item)

    def scale(self, x: Tensor) -> Tensor:
        self.begin("scale")
        self.end()
        return x * 2


@aiorpc.exclusive
class One(Actor):
    pass


class Sub(One):
    wrapped = 0

    @functools.wraps(One.work)
    async def work(self, item: Any) -> Any:
        self.wrapped += 1
        return await super().work(item)

    def compute(self, item: Any) -> Any:
        return super().compute(item)


def take(actor: Actor, item: Any) -> Any:
    return actor.compute(item)


def new(cls: type[Actor] = One) -> tuple[Any, Any]:
    actor = cls()
    return actor, RRef(actor)


# ── one at a time, in order ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cls", [One, Sub])
async def test_calls_of_every_kind_take_turns(cls: type[Actor]) -> None:
    """Methods, threads, streams, functions, local coroutines, failures: in the order of arrival."""
    actor, rref = new(cls)

    async def stream(name: str, item: Any) -> list[Any]:
        return [each async for each in getattr(remote(rref), name)(item)]

    found = await asyncio.gather(
        remote(rref).work(0),
        remote(rref).compute(1),
        stream("items", 2),
        call(rref, Actor.work, 3),
        remote(rref).fail(4),
        call(rref, take, 5),
        stream("items_in_thread", 6),
        remote(rref).plain_coroutine(7),
        remote(rref).compute(8),
        return_exceptions=True,
    )
    assert isinstance(found.pop(4), LookupError)
    assert found == [0, 1, [0, 1, 2], 3, 5, [0, 1, 2], 7, 8]
    assert actor.log == [*range(9)]
    assert actor.most == 1
    await remote(rref).work(9)
    assert getattr(actor, "wrapped", 4) == 4  # the override ran, although its guard did not
    async with asyncio.timeout(30.0):  # nothing holds the object any more
        assert await remote(rref).work(10) == 10


async def test_a_local_coroutine_waits_for_calls_of_peers() -> None:
    actor, rref = new()
    holds = asyncio.create_task(remote(rref).hold("remote"))
    await actor.gate.entered()
    local = asyncio.create_task(actor.work("local"))
    later = asyncio.create_task(remote(rref).work("later"))
    await asyncio.sleep(0)
    assert actor.log == ["remote"]
    await actor.gate.open()
    assert await asyncio.gather(holds, local, later) == ["remote", "local", "later"]
    assert actor.log == ["remote", "local", "later"]


async def test_calls_of_other_objects_do_not_wait() -> None:
    actor, rref = new()
    _, other = new()
    holds = asyncio.create_task(remote(rref).hold(1))
    await actor.gate.entered()
    assert await remote(other).work(2) == 2
    await actor.gate.open()
    assert await holds == 1


async def test_waiting_calls_hold_no_thread() -> None:
    """More plain methods than there are threads wait; other objects are served."""
    actor, rref = new()
    other, free = new()
    holds = asyncio.create_task(remote(rref).hold_in_thread("held"))
    await actor.gate.entered()
    waiting = [asyncio.create_task(remote(rref).compute(n)) for n in range(40)]
    assert await remote(free).compute("free") == "free"
    await actor.gate.open()
    assert await asyncio.gather(holds, *waiting) == ["held", *range(40)]
    assert actor.log == ["held", *range(40)]
    assert other.log == ["free"]


async def test_a_copy_is_taken_between_calls() -> None:
    actor, rref = new()
    await asyncio.gather(remote(rref).work(1), fetched(rref), remote(rref).work(2))
    assert actor.most == 1


async def test_a_batch_is_one_call() -> None:
    """Its calls wait together; what comes while it waits is in the next batch."""
    actor, rref = new()
    holds = asyncio.create_task(remote(rref).hold("held"))
    await actor.gate.entered()
    first = [asyncio.create_task(remote(rref).batch(n)) for n in range(3)]
    second = [asyncio.create_task(remote(rref).batch_in_thread(n)) for n in range(3)]
    await remote(RRef(Actor())).work("read")  # all were read
    await actor.gate.open()
    assert await asyncio.gather(holds, *first, *second) == ["held", 0, 1, 2, 0, 1, 2]
    assert actor.log == ["held", ("batch", 0, 1, 2), ("batch", 0, 1, 2)]
    assert actor.most == 1


async def test_recorded_calls_take_turns() -> None:
    """Those of an autograd context, whose payloads go by torch."""
    actor, rref = new()
    x = torch.ones(3, requires_grad=True)
    async with autograd.context() as context:
        results = await asyncio.gather(*(remote(rref).scale(x) for _ in range(3)))
        await context.backward([torch.stack([each.sum() for each in results]).sum()])
        gradients = await context.gradients()
    assert actor.most == 1
    assert actor.log == ["scale"] * 3
    assert torch.equal(gradients[x], torch.full((3,), 6.0))


async def test_large_results_and_arguments_take_turns() -> None:
    actor, rref = new()
    x = torch.ones(200_000)
    await asyncio.gather(*(remote(rref).scale(x) for _ in range(4)), remote(rref).work(1))
    assert actor.most == 1


kinds = st.sampled_from(["work", "compute", "items", "items_in_thread", "batch", "plain_coroutine"])


@settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.lists(st.tuples(kinds, st.integers(0, 3)), min_size=1, max_size=12))
async def test_never_two_at_once(plan: list[tuple[str, int]]) -> None:
    """Calls of any kinds, each cancelled after some iterations or not (0)."""
    actor, rref = new()

    async def run(kind: str, item: int) -> None:
        made = getattr(remote(rref), kind)(item)
        if kind.startswith("items"):
            async for _ in made:
                pass
        else:
            await made

    tasks = [asyncio.create_task(run(kind, n)) for n, (kind, _) in enumerate(plan)]
    for iteration in range(1, 4):
        await asyncio.sleep(0)
        for task, (_, ends) in zip(tasks, plan, strict=True):
            if ends == iteration:
                task.cancel()
    async with asyncio.timeout(20.0):
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await remote(rref).work("last") == "last"
    assert actor.most == 1
    order = [item for item in actor.log if isinstance(item, int)]
    assert order == sorted(order)
    kept = [n for n, (kind, ends) in enumerate(plan) if not ends and kind != "batch"]
    assert set(kept) <= set(order)


# ── cancellation, deadlines ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["work", "compute", "items"])
async def test_a_waiting_call_that_is_cancelled_frees_its_place(kind: str) -> None:
    actor, rref = new()
    holds = asyncio.create_task(remote(rref).hold(0))
    await actor.gate.entered()

    async def wait() -> None:
        made = getattr(remote(rref), kind)(1)
        await (anext(aiter(made)) if kind == "items" else made)

    cancelled, last = asyncio.create_task(wait()), asyncio.create_task(remote(rref).work(2))
    await remote(RRef(Actor())).work("read")
    cancelled.cancel()
    await remote(RRef(Actor())).work("read")
    await actor.gate.open()
    assert await asyncio.gather(holds, last) == [0, 2]
    assert actor.log == [0, 2]


async def test_a_deadline_that_passes_while_waiting_frees_the_place() -> None:
    actor, rref = new()
    holds = asyncio.create_task(remote(rref).hold(0))
    await actor.gate.entered()
    with pytest.raises(aiorpc.CallTimeout):
        await remote(rref, timeout=0.01).work(1)
    await actor.gate.open()
    assert await holds == 0
    assert await remote(rref).work(2) == 2
    assert actor.log == [0, 2]


async def test_a_cancelled_coroutine_holds_its_turn_until_it_has_ended() -> None:
    actor, rref = new()
    lingers = asyncio.create_task(remote(rref).linger(0))
    waiting = asyncio.create_task(remote(rref).work(1))
    await remote(RRef(Actor())).work("read")
    lingers.cancel()
    await actor.gate.entered()
    assert actor.log == [0]
    await actor.gate.open()
    assert await waiting == 1
    assert actor.most == 1


async def test_a_cancelled_thread_holds_its_turn_until_it_has_ended() -> None:
    actor, rref = new()
    holds = asyncio.create_task(remote(rref).hold_in_thread(0))
    await actor.gate.entered()
    waiting = asyncio.create_task(remote(rref).work(1))
    holds.cancel()
    await remote(RRef(Actor())).work("read")
    assert actor.log == [0]
    await actor.gate.open()
    assert await waiting == 1
    assert actor.most == 1


async def test_a_stream_holds_its_turn_between_its_items() -> None:
    """Leaving it early ends the turn."""
    actor, rref = new()
    stream = aiter(remote(rref).hold_stream("stream"))
    assert await anext(stream) == "stream"
    waiting = asyncio.create_task(remote(rref).work(1))
    await remote(RRef(Actor())).work("read")
    assert actor.log == ["stream"]
    await stream.aclose()
    assert await waiting == 1
    assert actor.most == 1


class Unreadable:
    """An argument that the callee cannot read."""

    def __reduce__(self) -> Any:
        return int, ("unreadable",)


async def test_an_argument_that_cannot_be_read() -> None:
    """Its call raises why, and takes no turn; the next call runs."""
    actor, rref = new()
    for method in ("work", "compute"):
        with pytest.raises(ValueError, match="unreadable"):
            await getattr(remote(rref), method)(Unreadable())
    with pytest.raises(ValueError, match="unreadable"):
        await anext(aiter(remote(rref).hold_stream(Unreadable())))
    assert await remote(rref).work(1) == 1
    assert actor.log == [1]


async def test_a_stream_in_threads_without_credit_holds_its_turn() -> None:
    """It is in no thread then; a cancellation closes it, which ends the turn."""
    actor, rref = new()
    stream = aiter(remote(rref).items_in_thread("stream", 1000))
    assert await anext(stream) == 0
    waiting = asyncio.create_task(remote(rref).work(1))
    await remote(RRef(Actor())).work("read")
    assert actor.log == ["stream"]
    await stream.aclose()
    assert await waiting == 1
    assert actor.most == 1


# ── a call of the object by itself ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "route",
    [
        ("ask", "work", 1),
        ("ask", "compute", 1),
        ("ask_in_thread", "work", 1),
        ("ask", "batch", 1),
        ("take", "items", 1),
        ("take", "items_in_thread", 1),
    ],
)
async def test_a_call_of_the_own_object_raises(route: tuple[Any, ...]) -> None:
    actor, rref = new()
    first, *rest = route
    with pytest.raises(RuntimeError, match="an exclusive object calls itself"):
        await getattr(remote(rref), first)(rref, *rest)
    assert await remote(rref).work(2) == 2
    assert actor.log == [2]


@pytest.mark.parametrize("between", [Actor, One])
async def test_a_call_of_the_own_object_through_another(between: type[Actor]) -> None:
    actor, rref = new()
    _, other = new(between)
    with pytest.raises(RuntimeError, match="an exclusive object calls itself"):
        await remote(rref).ask(other, "ask", rref, "work", 1)
    assert await remote(rref).ask(other, "work", 2) == 2
    assert await remote(rref).work(3) == 3
    assert actor.log == [3]


async def test_the_refusal_of_one_call_leaves_the_waiting_ones() -> None:
    """A call by the object itself fails at once, also behind others."""
    actor, rref = new()
    asks = asyncio.create_task(remote(rref).ask(rref, "work", 1))
    waiting = asyncio.create_task(remote(rref).work(2))
    with pytest.raises(RuntimeError, match="calls itself"):
        await asks
    assert await waiting == 2
    assert actor.log == [2]


# ── plain torch ─────────────────────────────────────────────────────────────────────────────────


async def test_plain_torch_clients() -> None:
    """An `async_execution` method takes its turn; a plain `def` runs at once."""
    actor, rref = new()
    holds = asyncio.create_task(remote(rref).hold("held"))
    await actor.gate.entered()
    waiting = asyncio.create_task(asyncio.to_thread(lambda: rref.rpc_sync().for_torch("torch")))
    function = asyncio.to_thread(lambda: rref.rpc_sync().log_size())
    actor_type: Any = Actor
    actor_type.log_size = lambda self: len(self.log)
    try:
        assert await function == 1
    finally:
        del actor_type.log_size
    await actor.gate.open()
    assert await asyncio.gather(holds, waiting) == ["held", "torch"]
    assert actor.log == ["held", "torch"]
    assert actor.most == 1


async def test_two_loops_share_the_turns() -> None:
    """Coroutines that a thread runs on a loop of its own wait for those of the worker."""
    actor, rref = new()
    begun = threading.Event()

    async def elsewhere() -> list[Any]:
        begun.set()
        return [await actor.work(n) for n in range(20)]

    thread = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(elsewhere())))
    await asyncio.to_thread(begun.wait)
    for n in range(20, 40):
        assert await remote(rref).work(n) == n
    assert await thread == [*range(20)]
    assert actor.most == 1
    assert sorted(actor.log) == [*range(40)]


async def test_a_stream_that_does_not_get_its_turn() -> None:
    """It ends alone: the connection, and other calls on it, go on."""
    actor: Any = RRef(aiorpc.exclusive(Waiting)())
    holding = asyncio.ensure_future(remote(actor).wait())
    gate = actor.local_value().gate
    await gate.entered()
    for timeout in (1e-5, 1e-4, 1e-3, 1e-2):
        with pytest.raises(aiorpc.CallTimeout):
            async for _ in remote(actor, timeout=timeout).items():
                pass
        leaving = asyncio.ensure_future(anext(aiter(remote(actor).items())))
        await asyncio.sleep(timeout)
        leaving.cancel()
        await asyncio.wait([leaving])
    await gate.open()
    assert await holding == 5


class Waiting:
    def __init__(self) -> None:
        self.gate = Gate()

    async def wait(self) -> int:
        await self.gate.passed()
        return 5

    async def items(self) -> AsyncIterator[int]:
        yield 1
