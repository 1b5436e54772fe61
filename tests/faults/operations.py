"""The operations of the search, each a coroutine function of a `Scene`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    Broadcast,
    Group,
    NotInWorld,
    Round,
    RpcError,
    RRef,
    autograd,
    batched,
    create,
    exclusive,
    fetch,
    lookup,
    max_concurrency,
    paused,
    remote,
    supervised,
    testing,
)
from aiorpc_torch.training import (
    Follower,
    Replay,
    SampleLimit,
    StalenessLimit,
    Weights,
    follow,
    recover,
)
from tests.support.tensor_ways import TENSOR_WAYS

from .loop import SteppingLoop

LONG = 3 << 20  # bytes that are loaded in a thread
SMALL, LARGE, HUGE = 4, 1 << 16, 1 << 19  # floats: in the frame, beside it, copied in a thread


class Actor:
    """What calls reach. A fresh one for each run, so that no connection remembers its methods."""

    def __init__(self, loop: SteppingLoop | None = None) -> None:
        self._loop = loop
        self._lock = asyncio.Lock()

    def __reduce__(self) -> Any:
        raise TypeError("actors stay where they are")

    def _wait(self) -> None:
        """Return once the loop has nothing else to do."""
        if self._loop is not None:
            self._loop.parked()

    async def echo(self, value: Any = None) -> Any:
        return value

    async def late(self, value: Any = None) -> Any:
        await asyncio.sleep(0.01)
        return value

    def plain(self, value: Any = None) -> Any:
        return value

    def slow(self, size: int) -> Tensor:
        self._wait()
        return torch.ones(size)

    async def make(self, size: int) -> Tensor:
        return torch.ones(size)

    async def items(self, count: int, size: int) -> AsyncIterator[Tensor]:
        for _ in range(count):
            yield torch.ones(size)

    async def given(self, items: list[Any]) -> AsyncIterator[Any]:
        for item in items:
            yield item

    def plain_items(self, count: int, size: int) -> Iterator[Tensor]:
        for _ in range(count):
            yield torch.ones(size)

    def slow_items(self, count: int, size: int) -> Iterator[Tensor]:
        for _ in range(count):
            self._wait()
            yield torch.ones(size)

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[int]:
        async with self._lock:
            yield 1

    async def scaled(self, value: Tensor) -> Tensor:
        return value * 2

    @batched(max_size=2)
    async def together(self, values: list[Any]) -> list[Any]:
        await asyncio.sleep(0)
        return values

    @batched(max_size=2)
    def together_in_thread(self, values: list[Any]) -> list[Any]:
        return values

    @batched(max_size=2)
    def slowly_together(self, values: list[Any]) -> list[Any]:
        self._wait()
        return values

    @batched(max_size=2)
    async def items_together(self, counts: list[int], sizes: list[int]) -> AsyncIterator[list[Any]]:
        for step in range(max(counts)):
            await asyncio.sleep(0)
            yield _entries(step, counts, sizes)

    @batched(max_size=2)
    def slow_items_together(self, counts: list[int], sizes: list[int]) -> Iterator[list[Any]]:
        for step in range(max(counts)):
            self._wait()
            yield _entries(step, counts, sizes)

    @batched(Round(2))
    async def round(self, values: list[Any]) -> Any:
        await asyncio.sleep(0)
        return Broadcast(len(values))

    @batched(Round(2))
    async def large_round(self, values: list[Any]) -> Any:
        await asyncio.sleep(0)
        return Broadcast(values[0])

    @batched(Round(2))
    def round_in_thread(self, values: list[Any]) -> Any:
        self._wait()
        return Broadcast(len(values))


def _entries(step: int, counts: list[int], sizes: list[int]) -> list[Any]:
    both = zip(counts, sizes, strict=True)
    return [torch.ones(size) if step < count else StopAsyncIteration() for count, size in both]


@max_concurrency(2)
class LimitedActor(Actor):
    """Two calls run at once, and the others wait."""


@exclusive
class Exclusive(Actor):
    """One call at a time."""


@dataclass
class Scene:
    """What one run of an operation uses."""

    loop: SteppingLoop
    there: "RRef[Any] | None" = None  # an actor of another process, for all calls

    def actor(self, cls: type[Actor] = Actor) -> "RRef[Any]":
        return self.there or RRef(cls(self.loop))

    def group(self, size: int = 2) -> "Group[Any]":
        return Group([self.actor() for _ in range(size)])


@dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes:
        name: of the tests.
        run: runs it once.
        way: of large tensors, one of `TENSOR_WAYS`.
        around: where it runs: in a "world", in one that is "watched", beside an "agent" of
            `rpc.init_rpc`, or in "nothing".
        raises: exceptions with which it ends without a fault.
        waits: whether it waits for other things than calls, too.
    """

    name: str
    run: Callable[[Scene], Awaitable[Any]]
    way: str = "shared"
    raises: tuple[type[BaseException], ...] = ()
    around: str = "world"
    waits: bool = False


OPERATIONS: list[Operation] = []
WORLDS = ("world", "watched")


def operation(
    *,
    ways: tuple[str, ...] = ("shared",),
    raises: tuple[type[BaseException], ...] = (),
    around: str = "world",
    waits: bool = False,
) -> Callable[[Callable[[Scene], Awaitable[Any]]], Callable[[Scene], Awaitable[Any]]]:
    """Add an operation, once for each way of large tensors."""

    def add(run: Callable[[Scene], Awaitable[Any]]) -> Callable[[Scene], Awaitable[Any]]:
        for way in ways:
            name = run.__name__.replace("_", " ") + f" over {way}" * (way != "shared")
            OPERATIONS.append(Operation(name, run, way, raises, around, waits))
        return run

    return add


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


@operation()
async def lone_call(scene: Scene) -> Any:
    return await remote(scene.actor()).echo(1)


@operation()
async def late_call(scene: Scene) -> Any:
    return await remote(scene.actor()).late(1)


@operation()
async def lone_def(scene: Scene) -> Any:
    return await remote(scene.actor()).plain(1)


@operation()
async def slow_def(scene: Scene) -> Any:
    return await remote(scene.actor()).slow(SMALL)


@operation()
async def queued_calls(scene: Scene) -> Any:
    actor = remote(scene.actor())
    return await asyncio.gather(actor.echo(1), actor.plain(2), actor.late(3), actor.echo(value=4))


@operation(ways=TENSOR_WAYS)
async def large_argument(scene: Scene) -> Any:
    actor = remote(scene.actor())
    return await actor.plain(torch.ones(LARGE)) is not None


@operation(ways=TENSOR_WAYS)
async def large_result(scene: Scene) -> Any:
    actor = remote(scene.actor())
    return [await actor.make(LARGE) is not None, await actor.make(LARGE) is not None]


@operation(ways=TENSOR_WAYS)
async def large_result_of_a_slow_def(scene: Scene) -> Any:
    return await remote(scene.actor()).slow(LARGE) is not None


@operation(ways=TENSOR_WAYS)
async def queued_large_calls(scene: Scene) -> Any:
    actor, value = remote(scene.actor()), torch.ones(LARGE)
    await asyncio.gather(actor.echo(value), actor.plain(value), actor.echo(1), actor.make(LARGE))


@operation(ways=("shared", "sockets"))
async def huge_call(scene: Scene) -> Any:
    return await remote(scene.actor()).echo(torch.ones(HUGE)) is not None


@operation(ways=TENSOR_WAYS)
async def arrays(scene: Scene) -> Any:
    actor = remote(scene.actor())
    value = {"one": np.ones(LARGE), "small": [np.ones(2048)] * 9, "two": np.ones(LARGE)}
    return await actor.plain(value) is not None


@operation(ways=TENSOR_WAYS)
async def long_bytes(scene: Scene) -> Any:
    actor, value = remote(scene.actor()), bytes(LONG)
    await asyncio.gather(actor.echo(value), actor.plain([value]), actor.echo(1))


@operation()
async def long_items(scene: Scene) -> Any:
    actor = remote(scene.actor())
    return len([item async for item in actor.given([bytes(LONG), np.ones(HUGE), 1])])


@operation(raises=(RpcError, ValueError))
async def refused_argument(scene: Scene) -> Any:
    return await remote(scene.actor()).echo(torch.ones(3, device="meta"))


# ── streams ─────────────────────────────────────────────────────────────────────────────────────


@operation(ways=TENSOR_WAYS)
async def stream(scene: Scene) -> Any:
    return len([item async for item in remote(scene.actor()).items(3, LARGE)])


@operation(ways=TENSOR_WAYS)
async def stream_of_a_def(scene: Scene) -> Any:
    return len([item async for item in remote(scene.actor()).plain_items(3, LARGE)])


@operation(ways=TENSOR_WAYS)
async def slow_stream_of_a_def(scene: Scene) -> Any:
    return len([item async for item in remote(scene.actor()).slow_items(3, LARGE)])


@operation()
async def long_stream(scene: Scene) -> Any:
    return len([item async for item in remote(scene.actor()).items(100, SMALL)])


@operation()
async def long_stream_of_a_def(scene: Scene) -> Any:
    return len([item async for item in remote(scene.actor()).plain_items(100, SMALL)])


@operation(ways=TENSOR_WAYS)
async def stream_left_early(scene: Scene) -> Any:
    async for item in remote(scene.actor()).items(3, LARGE):
        return item.numel()


@operation()
async def context_managers(scene: Scene) -> Any:
    actor = scene.actor()
    async with remote(actor).lend() as value:
        pass
    async with remote(actor).lend():
        return value


# ── groups ──────────────────────────────────────────────────────────────────────────────────────


@operation()
async def group_of_one(scene: Scene) -> Any:
    return await remote(scene.group(1)).echo(1)


@operation()
async def group_call(scene: Scene) -> Any:
    return await remote(scene.group()).plain(1)


@operation(ways=TENSOR_WAYS)
async def large_group_call(scene: Scene) -> Any:
    return len(await remote(scene.group()).echo(torch.ones(LARGE)))


@operation(ways=TENSOR_WAYS)
async def large_group_of_one(scene: Scene) -> Any:
    return len(await remote(scene.group(1)).echo(torch.ones(LARGE)))


@operation(raises=(RpcError, ValueError, ExceptionGroup))
async def refused_group_call(scene: Scene) -> Any:
    return await remote(scene.group(1)).echo(torch.ones(3, device="meta"))


@operation()
async def group_iterated(scene: Scene) -> Any:
    return len([each async for each in remote(scene.group()).late(1)])


@operation()
async def any_of_a_group(scene: Scene) -> Any:
    return await remote(scene.group().any()).echo(1)


@operation()
async def calls_on_routes(_: Scene) -> Any:
    """Each may take several attempts: of a supervised object, of any member, with retries."""
    made = await supervised("main", Actor)
    group = Group([made])
    calls = remote(made).late(1), remote(group.any(), retries=1).late(2)
    return await asyncio.gather(*calls, remote(made.rref, retries=1).late(3), _all_of(group))


async def _all_of(group: "Group[Any]") -> Any:
    return await remote(group, retries=1).late(4)


@operation()
async def streams_on_routes(scene: Scene) -> Any:
    made = await supervised("main", Actor)
    group = Group([made, scene.actor()])
    count = await _count(remote(made).items, 2, SMALL)
    count += await _count(remote(group.any(), retries=1).items, 2, SMALL)
    return count, [item async for item in group.map(Actor.echo, range(3))]


@operation(ways=TENSOR_WAYS)
async def group_map(scene: Scene) -> Any:
    group = scene.group()
    items = [1, torch.ones(LARGE), 3]
    return len([got async for got in group.map(Actor.echo, items)])


@operation(raises=(RpcError, ValueError))
async def refused_group_map(scene: Scene) -> Any:
    items = [torch.ones(3, device="meta")]
    return [got async for got in scene.group(1).map(Actor.echo, items)]


# ── batches, rounds, turns ──────────────────────────────────────────────────────────────────────


@operation()
async def batch(scene: Scene) -> Any:
    actor = remote(scene.actor())
    return await asyncio.gather(*(actor.together(each) for each in range(3)))


@operation()
async def batch_of_a_def(scene: Scene) -> Any:
    actor = remote(scene.actor())
    return await asyncio.gather(*(actor.slowly_together(each) for each in range(3)))


@operation(ways=("sockets",))
async def large_batch(scene: Scene) -> Any:
    actor, value = remote(scene.actor()), torch.ones(LARGE)
    return len(await asyncio.gather(*(actor.together(value + each) for each in range(3))))


@operation(ways=("sockets",))
async def large_rounds(scene: Scene) -> Any:
    actor, value = remote(scene.actor()), torch.ones(LARGE)
    return len(await asyncio.gather(*(actor.large_round(value) for _ in range(2))))


async def _count(method: Any, *args: Any, most: int = -1) -> int:
    found = 0
    async with contextlib.aclosing(aiter(method(*args))) as items:
        async for _ in items:
            found += 1
            if found == most:
                break
    return found


@operation(ways=TENSOR_WAYS)
async def batch_of_streams(scene: Scene) -> Any:
    method = remote(scene.actor()).items_together
    return await asyncio.gather(*(_count(method, count, LARGE) for count in (1, 3, 2)))


@operation()
async def batch_of_long_streams(scene: Scene) -> Any:
    method = remote(scene.actor()).items_together
    return await asyncio.gather(*(_count(method, count, SMALL) for count in (70, 66)))


@operation()
async def batch_of_streams_of_a_def(scene: Scene) -> Any:
    method = remote(scene.actor()).slow_items_together
    return await asyncio.gather(*(_count(method, count, SMALL) for count in (1, 3, 2)))


@operation()
async def batch_of_streams_left_early(scene: Scene) -> Any:
    actor = remote(scene.actor())
    methods = actor.items_together, actor.slow_items_together
    return await asyncio.gather(*(_count(each, 9, SMALL, most=2) for each in methods))


@operation(waits=True)
async def local_batch_of_streams(scene: Scene) -> Any:
    actor = Actor(scene.loop)
    one, other = actor.items_together, actor.slow_items_together
    counts = _count(one, 1, SMALL), _count(one, 3, SMALL), _count(other, 2, SMALL)
    return await asyncio.gather(*counts)


@operation(waits=True)
async def local_batch(scene: Scene) -> Any:
    actor = Actor(scene.loop)
    return await asyncio.gather(*(actor.together(each) for each in range(3)))


@operation(waits=True)
async def local_batch_of_a_def(scene: Scene) -> Any:
    actor = Actor(scene.loop)
    return await asyncio.gather(*(actor.together_in_thread(each) for each in range(3)))


@operation(waits=True)
async def local_batch_of_a_slow_def(scene: Scene) -> Any:
    actor = Actor(scene.loop)
    return await asyncio.gather(*(actor.slowly_together(each) for each in range(3)))


@operation(waits=True)
async def local_batches_of_a_def_in_a_row(scene: Scene) -> Any:
    """As code that goes on though the world ends."""
    actor, other = Actor(scene.loop), remote(scene.actor())
    for each in range(8):
        with contextlib.suppress(NotInWorld):
            await actor.together_in_thread(each)
    return actor, other


@operation()
async def rounds(scene: Scene) -> Any:
    actor = remote(scene.actor())
    return await asyncio.gather(actor.round(1), actor.round(2))


@operation(waits=True)
async def local_rounds(scene: Scene) -> Any:
    actor = Actor(scene.loop)
    return await asyncio.gather(actor.round(1), actor.round(2))


@operation()
async def rounds_of_a_def(scene: Scene) -> Any:
    actor = remote(scene.actor())
    return await asyncio.gather(actor.round_in_thread(1), actor.round_in_thread(2))


@operation(waits=True)
async def local_rounds_of_a_def(scene: Scene) -> Any:
    actor = Actor(scene.loop)
    return await asyncio.gather(actor.round_in_thread(1), actor.round_in_thread(2))


@operation()
async def exclusive_calls(scene: Scene) -> Any:
    actor = remote(scene.actor(Exclusive))
    return await asyncio.gather(actor.late(1), actor.slow(SMALL), actor.echo(3))


@operation()
async def exclusive_stream(scene: Scene) -> Any:
    actor = remote(scene.actor(Exclusive))
    stream = [item async for item in actor.items(2, SMALL)]
    return len(stream), await actor.echo(3)


@operation()
async def limited_calls(scene: Scene) -> Any:
    actor = remote(scene.actor(LimitedActor))
    return await asyncio.gather(*(actor.late(n) for n in range(3)), actor.slow(SMALL))


@operation()
async def calls_beside_a_pause(scene: Scene) -> Any:
    rref = scene.actor()
    actor = remote(rref)

    async def pause() -> Any:
        async with paused(rref):
            return await actor.late(2), await actor.plain(3)

    return await asyncio.gather(actor.late(1), pause(), actor.late(4), actor.together(5))


# ── objects ─────────────────────────────────────────────────────────────────────────────────────


@operation()
async def create_and_fetch(_: Scene) -> Any:
    return await fetch(await create("main", list, [1, 2]))


@operation()
async def look_up(scene: Scene) -> Any:
    aiorpc.register("actor", Actor(scene.loop))
    try:
        return await remote(await lookup("actor", on="main")).echo(1)
    finally:
        with contextlib.suppress(ValueError):  # the world has ended
            aiorpc.unregister("actor")


# ── training ────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def registered(name: str, thing: Any) -> Iterator[None]:
    aiorpc.register(name, thing)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the world has ended
            aiorpc.unregister(name)


@operation()
async def weights_followed(_: Scene) -> Any:
    weights = Weights([torch.ones(SMALL)])
    with registered("weights", weights):
        async with await follow("weights", on="main") as policy:
            await weights.publish([torch.ones(SMALL), torch.ones(LARGE)])
            await policy.wait(1)
            await weights.publish([torch.ones(SMALL)])
            async with policy.hold() as version:
                pass
            return version, await policy.update()


@operation()
async def weights_joined_and_recovered(_: Scene) -> Any:
    base = torch.ones(LARGE)
    weights = Weights({"base": base, "step": torch.zeros(1)})
    with registered("weights", weights):
        async with await follow("weights", on=["main"]) as policy:
            await weights.publish({"base": base, "step": torch.ones(1)})
            await policy.wait(1)
            found = await recover("weights")
            return policy.version, found and found.version


@operation()
async def weights_by_a_relay(_: Scene) -> Any:
    """Of small tensors: it keeps the last version for later followers."""
    weights = Weights([torch.ones(SMALL)])
    _, relay = await weights.source("another", "main")
    with registered("weights", weights):
        try:
            async with Follower("weights", "main", None, host="another") as policy:
                await policy._begin()
                await weights.publish([torch.zeros(SMALL)])
                return await policy.wait(1)
        finally:
            with contextlib.suppress(ValueError):
                aiorpc.unregister(relay)


@operation()
async def weights_written_into(_: Scene) -> Any:
    base = torch.ones(LARGE)
    weights = Weights({"base": base, "step": torch.zeros(1)})
    with registered("weights", weights):
        async with await follow("weights") as policy:
            policy.state["base"][0] = 7
            await weights.publish({"base": base, "step": torch.ones(1)})
            await policy.wait(1)
            return policy.state["base"].sum().item() == LARGE


@operation(waits=True)
async def tickets(_: Scene) -> Any:
    limit = StalenessLimit(0, 1)
    rref = RRef(limit)

    async def roll_out() -> int:
        async with remote(rref).ticket() as ticket:
            return int(ticket.version)

    try:
        await asyncio.gather(roll_out(), roll_out(), remote(rref).advance(1))
    finally:
        async with asyncio.timeout(ENDLESS / 10):
            while limit.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@operation()
async def replay_in_and_out(_: Scene) -> Any:
    replay = RRef(Replay(limit=SampleLimit(1, min_size=1, slack=1)))
    calls = remote(replay).sample(1), remote(replay).insert(1), remote(replay).insert(2)
    return await asyncio.gather(*calls, remote(replay).insert(3))


@operation()
async def members_by_name(scene: Scene) -> Any:
    """A map waits for the first member; a call is made by those that are there."""
    envs: aiorpc.types.NamedMembers[Actor] = aiorpc.members("env")
    results = envs.map(Actor.echo, range(3), in_flight=1)
    first = asyncio.create_task(_next(results))
    try:
        await asyncio.sleep(0)
        aiorpc.register("env", Actor(scene.loop))
        await envs.wait()
        await remote(envs).echo(1)
        return [await first, *[each async for each in results]]
    finally:
        first.cancel()
        with contextlib.suppress(ValueError):  # the world has ended
            aiorpc.unregister("env")


async def _next(results: Any) -> Any:
    return await anext(results)


@operation()
async def autograd_context(scene: Scene) -> Any:
    x = torch.ones(3, requires_grad=True)
    async with autograd.context() as ctx:
        y = await remote(scene.actor()).scaled(x)
        await ctx.backward([y.sum()])
        return (await ctx.gradients())[x].tolist()


# ── worlds ──────────────────────────────────────────────────────────────────────────────────────

ENDLESS = 1e9  # seconds of a heartbeat: time jumps here


@operation(around="nothing", waits=True)
async def world_entered_and_left(scene: Scene) -> Any:
    async with testing.world(heartbeat=ENDLESS, freeze_gc=False):
        return await remote(scene.actor()).echo(1)


@operation(around="nothing", waits=True)
async def world_left_with_a_call(scene: Scene) -> Any:
    with contextlib.suppress(NotInWorld):
        async with testing.world(heartbeat=ENDLESS, freeze_gc=False):
            waiting = asyncio.ensure_future(remote(scene.actor()).slow(SMALL))
            await asyncio.sleep(0)
        await waiting


@operation(around="nothing", waits=True)
async def world_left_by_an_exception(scene: Scene) -> Any:
    with contextlib.suppress(LookupError):
        async with testing.world(heartbeat=ENDLESS, freeze_gc=False):
            await remote(scene.actor()).echo(1)
            raise LookupError


@operation(around="agent", waits=True)
async def attached(scene: Scene) -> Any:
    async with aiorpc.attach(heartbeat=ENDLESS):
        return await remote(scene.actor()).echo(1)


# ── traces, metrics and an interceptor ──────────────────────────────────────────────────────────


@operation(around="watched")
async def watched_calls(scene: Scene) -> Any:
    actor = remote(scene.actor())
    results = await asyncio.gather(actor.echo(1), actor.slow(SMALL), actor.late(3))
    with contextlib.suppress(RpcError, ValueError):
        await actor.echo(torch.ones(3, device="meta"))
    return len(results)


@operation(around="watched")
async def watched_streams(scene: Scene) -> Any:
    actor = remote(scene.actor())
    found = [item async for item in actor.items(2, SMALL)]
    return len(found), [item.numel() async for item in actor.slow_items(2, SMALL)]


@operation(around="watched")
async def watched_batches(scene: Scene) -> Any:
    actor = remote(scene.actor())
    own, other = (actor.together(each) for each in range(2)), actor.slowly_together(3)
    return await asyncio.gather(*own, other, Actor(scene.loop).together(4))


@operation(around="watched")
async def watched_groups(scene: Scene) -> Any:
    group = scene.group()
    results = await remote(group).plain(1)
    return results, [each async for each in group.map(Actor.echo, range(3))]
