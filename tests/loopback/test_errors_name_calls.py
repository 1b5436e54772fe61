"""`CallTimeout` and `WorkerLost` name worker and method, and say whether the call may have run."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    CallTimeout,
    GroupError,
    RRef,
    WorkerLost,
    call,
    create,
    fetch,
    proxy,
    remote,
)
from aiorpc_torch.autograd import DistributedOptimizer, context, parameter_rrefs
from aiorpc_torch.testing import Gate, connection, drop_connection, stalled
from tests.support import actors
from tests.support.actors import Batching, Counter, Sleeper, Streams
from tests.support.slack import BEGUN

pytestmark = pytest.mark.usefixtures("world")


async def iterate(stream: Any) -> list[Any]:
    return [item async for item in stream]


class Slow:
    """Nothing of it returns."""

    async def wait(self) -> None:
        await asyncio.Event().wait()


async def make_slowly() -> Slow:
    await asyncio.Event().wait()
    return Slow()


async def calls() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Return a call of each kind that never ends, under the name that its errors have."""
    sleeper, streams, batching = [
        await create("main", each) for each in (Sleeper, Streams, Batching)
    ]
    own = RRef(Slow())
    return {
        "a method": ("Sleeper.sleep", lambda: remote(sleeper).sleep(600)),
        "a proxy": ("Slow.wait", lambda: proxy(own).wait()),
        "a typed method": ("Sleeper.sleep", lambda: call(sleeper, Sleeper.sleep, 600)),
        "a function": ("hold", lambda: call("main", hold, 600)),
        "create": ("make_slowly", lambda: create("main", make_slowly)),
        "a stream": ("Streams.follow", lambda: iterate(remote(streams).follow())),
        "a stream of a function": (
            "wait_for_ever",
            lambda: iterate(call("main", actors.wait_for_ever)),
        ),
        "a batch": ("Batching.total", lambda: remote(batching).total(1)),
    }


async def hold(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def late(make: Callable[[], Any]) -> CallTimeout:
    """Return the error of a call that does not end in time."""
    with aiorpc.timeout(BEGUN), pytest.raises(CallTimeout) as raised:
        await make()
    return raised.value


async def test_timeouts_of_calls_that_were_sent() -> None:
    """Each kind of call, bounded by the block."""
    made = await calls()
    errors = await asyncio.gather(*(late(make) for _, make in made.values()))
    for (kind, (name, _)), error in zip(made.items(), errors, strict=True):
        assert (error.worker, error.method, error.may_have_run) == ("main", name, True), kind
        assert str(error).startswith(f"{name} on worker 'main' timed out after 0."), kind
        assert "; it may have run" in str(error), kind


async def test_groups_name_their_calls_as_single_calls_are_named() -> None:
    """With the class: in the text of GroupError, in each member's error and before the start."""
    sleeper = await create("main", Sleeper)
    group = aiorpc.Group([sleeper])
    kinds: list[Callable[[], Any]] = [
        lambda: remote(group).sleep(600),
        lambda: call(group, Sleeper.sleep, 600),
        lambda: iterate(remote(group).sleep(600)),
    ]
    for make in kinds:
        with aiorpc.timeout(BEGUN), pytest.raises(GroupError) as raised:
            await make()
        assert str(raised.value).startswith("Sleeper.sleep: 1 of 1 members failed")
        (error,) = raised.value.exceptions
        assert isinstance(error, CallTimeout)
        assert error.method == "Sleeper.sleep"
    for make in [*kinds, lambda: iterate(group.map(Sleeper.sleep, [600]))]:
        with aiorpc.timeout(0.0), pytest.raises(CallTimeout) as late:
            await make()
        assert (late.value.method, late.value.may_have_run) == ("Sleeper.sleep", False)


async def test_timeouts_of_calls_that_were_not_sent() -> None:
    """After the deadline nothing is sent; the error says so."""
    for kind, (name, make) in (await calls()).items():
        before = aiorpc.observe.stats().calls
        with aiorpc.timeout(0.0), pytest.raises(CallTimeout, match=r"it was not sent$") as raised:
            await make()
        error = raised.value
        assert (error.worker, error.method, error.may_have_run) == ("main", name, False), kind
        assert aiorpc.observe.stats().calls == before


async def test_timeout_of_a_call_that_waits_to_be_sent() -> None:
    """A call in the queue of its connection has not run."""
    sleeper = await create("main", Sleeper)
    with stalled("main"):
        with pytest.raises(CallTimeout, match=r"^Sleeper\.sleep .*; it was not sent$") as raised:
            await remote(sleeper, timeout=0.05).sleep(0)
        assert not raised.value.may_have_run
        with pytest.raises(CallTimeout, match=r"^Streams\.follow .*; it was not sent$"):
            await iterate(remote(RRef(Streams()), timeout=0.05).follow())
    assert await remote(await create("main", Counter)).add() == 1


async def test_the_time_of_a_call_narrows_the_block() -> None:
    """`timeout=` and `aiorpc.timeout`: the earlier of both, whichever it is."""
    gate = await create("main", Gate)
    for outer, inner in ((600.0, 0.05), (0.05, 600.0), (None, 0.05)):
        with aiorpc.timeout(outer), pytest.raises(CallTimeout, match=r"after 0\.0\d* s"):
            await remote(gate, timeout=inner).passed()
        with aiorpc.timeout(outer), pytest.raises(CallTimeout, match=r"after 0\.0\d* s"):
            await proxy(gate, timeout=inner).passed()


@pytest.mark.parametrize("timeout", ["1", float("nan"), True, object()])
async def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    """Anything else is refused where it is written."""
    counter = await create("main", Counter)
    for make in (remote, proxy):
        with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
            make(counter, timeout=timeout)
    with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
        await fetch(counter, timeout=timeout)
    with (
        pytest.raises(TypeError, match="timeout must be a number of seconds or None"),
        aiorpc.timeout(timeout),
    ):
        pass
    assert await remote(counter, timeout=torch.float32.itemsize).add() == 1


async def test_keywords_of_call_and_create_are_the_functions() -> None:
    """`timeout=` there is a keyword of the function."""
    assert await call("main", keywords, timeout=3) == {"timeout": 3}
    holder = await create("main", Holds, timeout=4)
    assert await remote(holder).held() == 4
    assert await call(holder, Holds.held, timeout=5) == 5


def keywords(**given: Any) -> dict[str, Any]:
    return given


class Holds:
    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def held(self, timeout: float | None = None) -> float:
        return timeout or self.timeout

    async def numbers(self) -> AsyncIterator[int]:
        yield 1

    @property
    def computed(self) -> int:
        raise AssertionError("nothing computes it")


async def test_losses_name_the_calls_that_they_end() -> None:
    """Sent calls may have run."""
    found = await calls()
    tasks = {kind: asyncio.ensure_future(make()) for kind, (_, make) in found.items()}
    async with asyncio.timeout(20):
        while aiorpc.observe.stats().in_flight < len(tasks) or aiorpc.observe.stats().unsent:  # noqa: ASYNC110
            await asyncio.sleep(0)
    drop_connection("main", WorkerLost("main", "for this test"))
    for kind, (name, _) in found.items():
        with pytest.raises(WorkerLost) as raised:
            await tasks[kind]
        error = raised.value
        assert (error.worker, error.method, error.may_have_run) == ("main", name, True), kind
        assert str(error) == f"worker 'main' is lost: for this test; {name} may have run"


async def test_losses_of_calls_that_were_not_sent() -> None:
    """Such as those that wait for their connection."""
    found = await calls()
    with stalled("main"):
        tasks = {kind: asyncio.ensure_future(make()) for kind, (_, make) in found.items()}
        async with asyncio.timeout(20):
            while connection("main").pending < len(tasks):  # noqa: ASYNC110
                await asyncio.sleep(0)
        drop_connection("main", WorkerLost("main", "for this test"))
    for kind, (name, _) in found.items():
        with pytest.raises(WorkerLost) as raised:
            await tasks[kind]
        error = raised.value
        assert (error.worker, error.method, error.may_have_run) == ("main", name, False), kind
        assert str(error) == f"worker 'main' is lost: for this test; {name} was not sent"


async def test_errors_of_optimizers_and_of_backward() -> None:
    """A step is a call; a backward is none, so its error names none."""
    net = torch.nn.Linear(2, 1)
    optimizer = await DistributedOptimizer.create(
        torch.optim.SGD, await parameter_rrefs(net), lr=0.1
    )
    sleeper = await create("main", Sleeper)
    async with context() as ctx:
        with aiorpc.timeout(0.0):
            with pytest.raises(CallTimeout, match=r"^LocalOptimizer\.step .*it was not sent$"):
                await optimizer.step(ctx)
            with pytest.raises(CallTimeout, match=r"^LocalOptimizer on .*it was not sent$"):
                await DistributedOptimizer.create(
                    torch.optim.SGD, await unbounded_rrefs(net), lr=0.1
                )
        with pytest.raises(CallTimeout, match=r"^Sleeper\.sleep .*it may have run"):
            await remote(sleeper, timeout=BEGUN).sleep(600)
        loss = net(torch.ones(2)).sum()
        await ctx.backward([loss], timeout=20)
        gate = await create("main", Gate)
        waits = asyncio.ensure_future(remote(gate).passed())
        await remote(gate).entered()
        with pytest.raises(CallTimeout, match="backward") as raised:
            await ctx.backward([loss], timeout=0.05)
        assert (raised.value.worker, raised.value.method) == (None, None)
        await remote(gate).open()
        await waits


async def unbounded_rrefs(net: torch.nn.Module) -> list[RRef[torch.Tensor]]:
    return await parameter_rrefs(net)


# ── proxies ─────────────────────────────────────────────────────────────────────────────────────


async def test_the_methods_of_a_proxy_are_listed() -> None:
    """Where the class is known: from `create`, and at the owner. Properties are not computed."""
    for rref in (await create("main", Holds, 1), RRef(Holds(1))):
        assert dir(remote(rref)) == dir(proxy(rref)) == ["held", "numbers"]
    assert dir(remote(await create("main", make_holds))) == ["held", "numbers"], "its own object"
    assert await iterate(proxy(await create("main", Holds, 1)).numbers()) == [1]


def make_holds() -> Holds:
    return Holds(2)


TEXT = (
    "this is not rpc.remote: make objects with `await create('ps', PS)`, call functions with "
    "`await call('ps', f, x)`"
)


async def test_remote_explains_that_it_is_not_torchs() -> None:
    """A worker, a class or a further argument first; other mistakes have texts of their own."""
    counter: Any = await create("main", Counter)
    info = torch.distributed.rpc.get_worker_info("main")
    taken: list[Callable[[], Any]] = [
        lambda: remote("main"),  # type: ignore[arg-type]
        lambda: remote("main", Counter),  # type: ignore[arg-type]
        lambda: remote("main", Counter, args=(1,), kwargs={}),  # type: ignore[arg-type]
        lambda: remote(0),  # type: ignore[arg-type]
        lambda: remote(info),  # type: ignore[arg-type]
        lambda: remote(Counter),  # type: ignore[arg-type]
        lambda: remote(counter, 1),
        lambda: remote(counter, args=(1,)),
        lambda: remote("main", Counter, timeout=5),  # type: ignore[arg-type]
        lambda: proxy("main"),  # type: ignore[arg-type]
    ]
    for make in taken:
        with pytest.raises(TypeError) as raised:
            make()
        assert str(raised.value) == TEXT
    with pytest.raises(TypeError, match=r"^remote\(\) has no parameter timeuot$"):
        remote(counter, timeuot=1)
    with pytest.raises(TypeError, match="must be an RRef"):
        remote(None)  # type: ignore[arg-type]
    assert await remote(counter).add() == 1


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("not this one")


def unpicklable() -> Unpicklable:
    return Unpicklable()


def generator() -> Any:
    yield 1


async def test_a_result_that_cannot_be_pickled() -> None:
    """The error is that of pickling, and names the method."""
    with pytest.raises(ValueError, match="not this one") as raised:
        await call("main", unpicklable)
    assert any("result of unpicklable" in note for note in raised.value.__notes__)


async def test_a_generator_that_is_awaited() -> None:
    with pytest.raises(TypeError, match="generator is a generator; use `async for`"):
        await call("main", generator)
