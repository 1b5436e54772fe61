"""`paused`: a block in which only its own calls of some objects run."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, Group, RRef, batched, members, paused, register, remote
from aiorpc_torch.observe import stats
from tests.support.raw_connections import SOON
from tests.support.slack import BEGUN

pytestmark = pytest.mark.usefixtures("world")


class Learner:
    """Notes what starts and ends; its methods wait for their gates."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.thread_goes_on = threading.Event()

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    async def work(self, name: str) -> str:
        self.log.append(name)
        await self.gate(name).wait()
        self.log.append(f"{name} ended")
        return name

    async def note(self, name: str) -> str:
        self.log.append(name)
        return name

    def plain(self, name: str) -> str:
        self.log.append(name)
        assert self.thread_goes_on.wait(SOON)
        self.log.append(f"{name} ended")
        return name

    async def items(self, name: str) -> AsyncIterator[str]:
        self.log.append(name)
        yield name
        await self.gate(name).wait()
        self.log.append(f"{name} ended")

    @batched(max_size=4)
    async def batch(self, names: list[str]) -> list[str]:
        self.log.append(f"batch of {len(names)}")
        await self.gate("batch").wait()
        self.log.append("batch ended")
        return names

    async def by_itself(self, rref: RRef[Any], name: str) -> str:
        await self.gate(name).wait()
        return await remote(rref).note(name)  # type: ignore[no-any-return]


@aiorpc.exclusive
class Exclusive(Learner):
    pass


async def until(condition: Any) -> None:
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def log_of_a_pause(rref: RRef[Any]) -> list[str]:
    """What had happened when the block was entered."""
    async with paused(rref):
        return [*rref.local_value().log]


def start(call: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(call)


@pytest.mark.promise("limits.paused")
@pytest.mark.parametrize("kind", [Learner, Exclusive])
async def test_the_block_runs_alone(kind: type[Learner]) -> None:
    """It is entered when what runs has ended; its own calls run, and the others go on in order."""
    own = kind()
    rref = RRef(own)
    calls = [start(remote(rref).work("before"))]
    await until(lambda: own.log)
    entered = asyncio.Event()

    async def evaluate() -> None:
        async with paused(rref):
            entered.set()
            assert await remote(rref).note("inside") == "inside"
            assert await asyncio.gather(*(remote(rref).note(f"task {n}") for n in range(2)))
            own.gate("batch").set()
            assert await remote(rref).batch("mine") == "mine"
            await own.gate("evaluated").wait()

    evaluating = start(evaluate())
    await until(lambda: stats().running >= 2)
    calls += [start(remote(rref).note(f"later {n}")) for n in range(3)]
    calls.append(start(remote(rref).batch("later")))
    await settle()
    assert own.log == ["before"]
    assert not entered.is_set()
    own.gate("before").set()
    await until(lambda: "batch ended" in own.log)
    await settle()
    own.gate("evaluated").set()
    await evaluating
    inside = ["inside", "task 0", "task 1", "batch of 1", "batch ended"]
    later = ["later 0", "later 1", "later 2", "batch of 1", "batch ended"]
    assert await asyncio.gather(*calls) == ["before", "later 0", "later 1", "later 2", "later"]
    assert own.log == ["before", "before ended", *inside, *later]


@pytest.mark.promise("limits.paused")
async def test_streams_batches_and_threads_end_first() -> None:
    """Also a plain `def` whose caller has left, which runs on."""
    own = Learner()
    rref = RRef(own)
    stream = aiter(remote(rref).items("stream"))
    assert await anext(stream) == "stream"
    batch = [start(remote(rref).batch(f"{n}")) for n in range(2)]
    plain = start(remote(rref).plain("plain"))
    await until(lambda: "plain" in own.log and any("batch" in each for each in own.log))
    plain.cancel()
    await asyncio.wait([plain])

    pausing = start(log_of_a_pause(rref))
    own.gate("batch").set()
    assert await asyncio.gather(*batch) == ["0", "1"]
    own.gate("stream").set()
    assert [each async for each in stream] == []
    await asyncio.sleep(0.05)
    assert not pausing.done()
    own.thread_goes_on.set()
    assert {"stream ended", "batch ended", "plain ended"} <= {*await pausing}


@pytest.mark.promise("limits.paused")
async def test_later_calls_wait_within_their_deadlines() -> None:
    """And can be cancelled."""
    own = Learner()
    rref = RRef(own)
    async with paused(rref):
        outsiders = asyncio.Event()

        async def call_outside() -> None:
            cancelled = start(remote(rref).note("cancelled"))
            await settle()
            cancelled.cancel()
            with pytest.raises(CallTimeout):
                await remote(rref, timeout=0.05).note("late")
            outsiders.set()

        outside = _outside(call_outside())
        await asyncio.wait_for(outsiders.wait(), SOON)
        await outside
        assert own.log == []
        assert stats().running <= 1  # the pause itself
    assert await remote(rref).note("next") == "next"
    assert own.log == ["next"]


def _outside(coroutine: Any) -> "asyncio.Task[Any]":
    """A task that is no part of the block."""
    return asyncio.create_task(coroutine, context=contextvars.Context())


@pytest.mark.promise("limits.paused")
@pytest.mark.parametrize("kind", [Learner, Exclusive])
async def test_a_running_call_that_calls_its_own_object(kind: type[Learner]) -> None:
    """The pause waits for both, and is no deadlock. (An exclusive object refuses such a call.)"""
    own = kind()
    rref = RRef(own)
    call = start(remote(rref).by_itself(rref, "nested"))
    await until(lambda: "nested" in own.gates)

    async def pause() -> None:
        async with paused(rref):
            own.log.append("paused")

    pausing = start(pause())
    await until(lambda: stats().running == 2)
    own.gate("nested").set()
    await pausing
    if kind is Learner:
        assert await call == "nested"
        assert own.log == ["nested", "paused"]
    else:
        with pytest.raises(RuntimeError, match="calls itself"):
            await call
        assert own.log == ["paused"]


@pytest.mark.promise("limits.paused")
async def test_pauses_take_turns() -> None:
    """Those of several objects too, in any order. One inside its own begins at once."""
    one, two = RRef(Learner()), RRef(Learner())
    inside = most = 0

    async def pause(objects: Any) -> None:
        nonlocal inside, most
        async with paused(objects):
            inside += 1
            most = max(most, inside)
            await remote(two).note("inside")
            async with paused(two):
                await remote(two).note("twice")
            await asyncio.sleep(0.001)
            inside -= 1

    async with asyncio.timeout(SOON):
        await asyncio.gather(*(pause(Group([one, two][:: 1 - 2 * (n % 2)])) for n in range(6)))
    assert most == 1
    assert two.local_value().log == ["inside", "twice"] * 6
    register("learner", two)
    named = members("learner")
    await named.wait()
    async with paused(named), paused(remote(one)):
        assert await remote(two).note("named") == "named"
    aiorpc.unregister("learner")


@pytest.mark.promise("limits.paused")
async def test_a_holder_that_gives_up() -> None:
    """Before the block is entered, or inside: the calls go on."""
    own = Learner()
    rref = RRef(own)
    running = start(remote(rref).work("running"))
    await until(lambda: own.log)

    async def enter() -> None:
        with aiorpc.timeout(BEGUN):
            async with paused(rref):
                pytest.fail("it was entered")

    with pytest.raises(CallTimeout, match="still ran at the deadline") as raised:
        await enter()
    assert not raised.value.may_have_run
    assert await remote(rref).note("first") == "first"
    own.gate("running").set()
    assert await running == "running"

    async def fail() -> None:
        async with paused(rref):
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    assert await remote(rref).note("second") == "second"


async def test_what_cannot_be_paused() -> None:
    with pytest.raises(TypeError, match=r"paused takes an RRef, .* got \[1\]: write Group"):
        async with paused([1]):
            pass


class SelfPausing(Learner):
    async def checkpoint(self, rref: RRef[Any]) -> list[str]:
        async with paused(rref):
            self.log.append("checkpoint")
            await remote(rref).note("inside")
            return [*self.log]


@aiorpc.exclusive
class ExclusivePausing(SelfPausing):
    pass


@pytest.mark.promise("limits.paused")
async def test_a_method_that_pauses_its_own_object() -> None:
    """It waits for the others. In an exclusive object these wait for it."""
    rref = RRef(SelfPausing())
    running = start(remote(rref).work("running"))
    await until(lambda: rref.local_value().log)
    pausing = start(remote(rref).checkpoint(rref))
    await settle()
    assert not pausing.done()
    rref.local_value().gate("running").set()
    assert await pausing == ["running", "running ended", "checkpoint", "inside"]
    assert await running == "running"
    exclusive = RRef(ExclusivePausing())
    with pytest.raises(RuntimeError, match="a method of an object with a limit cannot pause it"):
        await remote(exclusive).checkpoint(exclusive)
    async with paused(exclusive):
        assert await remote(rref).checkpoint(rref)  # of another object
    assert await remote(exclusive).note("after") == "after"


@pytest.mark.promise("limits.paused")
async def test_a_batch_whose_callers_have_left_ends_first() -> None:
    own = Learner()
    rref = RRef(own)
    caller = start(remote(rref).batch("left"))
    await until(lambda: own.log)
    caller.cancel()
    await asyncio.wait([caller])

    pausing = start(log_of_a_pause(rref))
    await asyncio.sleep(0.05)
    assert not pausing.done()
    own.gate("batch").set()
    assert await pausing == ["batch of 1", "batch ended"]
