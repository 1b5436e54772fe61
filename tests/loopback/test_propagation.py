"""Context variables that travel with calls: `propagate`."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, Round, RRef, batched, call, remote, supervised
from tests.support.hooks import hooks as hooks

pytestmark = pytest.mark.usefixtures("hooks", "world")

VAR: ContextVar[Any] = ContextVar("tests.propagation.var", default="default")
OTHER: ContextVar[Any] = ContextVar("tests.propagation.other", default="default")


class Seer:
    """Tells what it sees."""

    async def on_loop(self, *_: Any) -> Any:
        return VAR.get()

    def in_thread(self, *_: Any) -> Any:
        return VAR.get()

    async def nested(self) -> Any:
        return await call("main", see_in_thread)

    def nested_in_thread(self) -> Any:
        return asyncio.run(see_from_own_loop())

    async def spawned(self) -> Any:
        seen = asyncio.create_task(self.on_loop())
        VAR.set("of the method")
        return await seen, VAR.get()

    async def items(self) -> AsyncIterator[Any]:
        for _ in range(3):
            yield VAR.get()
            await asyncio.sleep(0)

    def items_in_thread(self) -> Iterator[Any]:
        for _ in range(3):
            yield VAR.get(), torch.zeros(100_000)  # so that it waits for credit, too

    @batched(max_size=4, max_wait=30.0)
    async def together(self, xs: list[int]) -> list[Any]:
        return [VAR.get()] * len(xs)

    @batched(Round(size=2))
    def round(self, xs: list[int]) -> Any:
        return VAR.get(), OTHER.get()


def see_in_thread() -> Any:
    return VAR.get()


async def see_from_own_loop() -> Any:
    return await call("main", see_in_thread)


@pytest.mark.promise("calls.propagate")
@pytest.mark.parametrize("way", ["on_loop", "in_thread", "nested", "nested_in_thread"])
async def test_methods_see_the_value_of_their_caller(way: str) -> None:
    """On the loop and in a thread; calls that a method makes carry it on."""
    aiorpc.observe.propagate(VAR)
    seer = remote(RRef(Seer()))
    VAR.set({"of": "the caller"})
    assert await getattr(seer, way)() == {"of": "the caller"}
    # Concurrent calls have a value each.
    contexts = [contextvars.copy_context() for _ in range(5)]
    for number, context in enumerate(contexts):
        context.run(VAR.set, number)
    calls = [asyncio.Task(getattr(seer, way)(), context=each) for each in contexts]
    assert await asyncio.gather(*calls) == [0, 1, 2, 3, 4]


@pytest.mark.promise("calls.propagate")
async def test_a_variable_that_is_not_set() -> None:
    """The method sees the value of its worker's start, and later calls see nothing of earlier."""
    aiorpc.observe.propagate(VAR)
    seer = remote(RRef(Seer()))
    assert await seer.on_loop() == "default"
    context = contextvars.copy_context()
    context.run(VAR.set, "once")
    assert await asyncio.Task(seer.on_loop(), context=context) == "once"
    assert await seer.on_loop() == "default"
    assert await seer.spawned() == ("default", "of the method")
    assert VAR.get() == "default", "what a method sets stays there"


@pytest.mark.promise("calls.propagate")
async def test_streams_and_groups() -> None:
    """Each step of a generator, each member of a group, each attempt of a map."""
    aiorpc.observe.propagate(VAR)
    VAR.set("seen")
    seers = [RRef(Seer()) for _ in range(3)]
    assert [item async for item in remote(seers[0]).items()] == ["seen"] * 3
    assert [item[0] async for item in remote(seers[0]).items_in_thread()] == ["seen"] * 3
    group = Group(seers)
    assert await remote(group).on_loop() == ["seen"] * 3
    assert [result async for _, result in remote(group).in_thread()] == ["seen"] * 3
    assert [found async for found in group.map(Seer.on_loop, range(5))] == ["seen"] * 5


@pytest.mark.promise("batching.propagate")
async def test_a_batch_sees_what_all_its_callers_have() -> None:
    """Equal values are seen, and those that differ are not."""
    aiorpc.observe.propagate(VAR)
    aiorpc.observe.propagate(OTHER)
    OTHER.set([1])  # equal, and another object for each caller
    seer = RRef(Seer())

    async def join(value: str, method: str) -> Any:
        VAR.set(value)
        return await getattr(remote(seer), method)(0)

    assert await asyncio.gather(*(join("one", "together") for _ in range(4))) == ["one"] * 4
    differ = await asyncio.gather(*(join(each, "together") for each in "abcd"))
    assert differ == ["default"] * 4
    assert await asyncio.gather(join("a", "round"), join("b", "round")) == [("default", [1])] * 2


async def test_arguments_of_every_size() -> None:
    """The value travels with small, pickled and large arguments alike."""
    aiorpc.observe.propagate(VAR)
    VAR.set("seen")
    seer = remote(RRef(Seer()))
    for argument in (1, {"a": 1}, torch.zeros(4), torch.zeros(1_000_000), b"x" * 120_000):
        assert await seer.on_loop(argument) == "seen"
    VAR.set("x" * 60_000)
    assert await seer.on_loop(b"x" * 120_000) == "x" * 60_000


@pytest.mark.promise("calls.propagate")
async def test_values_are_small() -> None:
    """A large one, or one that cannot be pickled, fails the call and names the variable."""
    aiorpc.observe.propagate(VAR)
    seer = remote(RRef(Seer()))
    VAR.set("x" * 70_000)
    with pytest.raises(ValueError, match=r"at most 65536: 'tests\.propagation\.var' takes 70"):
        await seer.on_loop()
    VAR.set(lambda: None)
    with pytest.raises(Exception, match="pickle") as caught:
        await seer.on_loop()
    assert "context variable 'tests.propagation.var'" in caught.value.__notes__[-1]
    VAR.set("small")
    assert await seer.on_loop() == "small"
    assert aiorpc.observe.pending() == []


async def test_a_value_that_cannot_be_read() -> None:
    """It fails its own call."""
    aiorpc.observe.propagate(VAR)
    seer = remote(RRef(Seer()))
    VAR.set(Unreadable())
    for method in (seer.on_loop, seer.in_thread, seer.together):
        with pytest.raises(LookupError, match="unreadable") as caught:
            await method(0)
        assert "unpickling the context variable" in str(caught.value.__notes__)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise Ended


class Ended(BaseException):
    """As SystemExit is."""


async def test_values_that_local_callers_of_a_batch_cannot_compare() -> None:
    """Whatever their pickling raises, each caller is answered."""
    aiorpc.observe.propagate(VAR)
    seer = Seer()

    async def call_with_own_value() -> None:
        VAR.set(Unpicklable())
        await seer.together(0)

    async with asyncio.timeout(30):
        found = await asyncio.gather(
            *(call_with_own_value() for _ in range(4)), return_exceptions=True
        )
    assert [type(each) for each in found] == [Ended] * 4


async def test_members_of_a_group_that_wait_for_their_objects() -> None:
    """Their calls, which are sent later, carry the values of the group's call."""
    aiorpc.observe.propagate(VAR)
    seer = await supervised(0, Seer)
    VAR.set("of the caller")
    seer._lose(seer.rref)  # calls wait until it is known that its process is the same
    assert seer._start() is None
    assert await remote(Group([seer])).on_loop() == ["of the caller"]


class Unreadable:
    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise LookupError("unreadable")


def test_what_is_refused() -> None:
    """No variable, and a second one of a name."""
    with pytest.raises(TypeError, match="ContextVar"):
        aiorpc.observe.propagate("name")  # type: ignore[arg-type]
    aiorpc.observe.propagate(VAR)
    aiorpc.observe.propagate(VAR)
    with pytest.raises(ValueError, match="another context variable"):
        aiorpc.observe.propagate(ContextVar(VAR.name))
