"""Calls with lambdas, local functions and local classes, in a world of one."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import NotExported, RRef, batched, call, create, fetch, remote
from tests.support.actors import Counter

pytest.importorskip("cloudpickle")


class Failure(Exception):
    pass


@pytest.mark.usefixtures("world")
async def test_lambdas_and_local_functions_are_called() -> None:
    """Plain and `async def`, generators, with large tensors in a closure, and with RRefs."""
    large = torch.ones(100_000)
    counter = await create("main", Counter, 3)

    async def add(amount: int) -> int:
        return await remote(counter).add(amount)  # type: ignore[no-any-return]

    async def count(to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number

    assert await call("main", lambda a, b: a * b, 3, b=4) == 12
    assert await call("main", lambda: large.sum().item()) == 100_000
    assert await call("main", add, 2) == 5
    assert [item async for item in call("main", count, 3)] == [0, 1, 2]
    assert await call(counter, lambda it, x: it.add(x), 1) == 6
    assert await fetch(await create("main", lambda: 5)) == 5


@pytest.mark.usefixtures("world")
async def test_objects_of_a_local_class() -> None:
    """`remote` and `call` reach its methods and overrides; exceptions are the caller's own."""

    class Base:
        async def name(self) -> str:
            return "base"

        async def fail(self) -> None:
            raise Local(type(self).__name__)

        @batched(max_size=4)
        async def double(self, xs: list[int]) -> list[int]:
            return [2 * x for x in xs]

    class Derived(Base):
        async def name(self) -> str:
            return "derived of " + await super().name()

    class Local(Failure):
        pass

    rref = await create("main", Derived)
    assert await remote(rref).name() == await call(rref, Base.name) == "derived of base"
    with pytest.raises(Local, match="Derived"):
        await remote(rref).fail()
    assert await asyncio.gather(*(remote(rref).double(n) for n in range(3))) == [0, 2, 4]
    assert await call(rref, Base.double, 4) == 8
    assert type(await call("main", lambda x: x, Derived())) is Derived
    assert isinstance(await fetch(rref), Base)


async def test_exports_refuse_what_comes_by_value() -> None:
    """A target by value is refused unread; the worker's own functions run as before."""
    ran = []

    class Local:
        def run(self) -> None:
            ran.append(1)

    def run(*_: Any) -> None:
        ran.append(2)

    async with aiorpc.local_world(0, exports=[Counter]):
        counter = await create("main", Counter)
        for refused in (
            call("main", run),
            call("main", lambda: ran.append(3)),
            call(counter, run),
            create("main", Local),
        ):
            with pytest.raises(NotExported, match="by value"):
                await refused
        assert await remote(counter).add() == 1
        assert ran == []


@pytest.mark.usefixtures("world")
async def test_what_cannot_be_sent_by_value_loses_nothing() -> None:
    """The error is raised at the call, and an RRef beside it stays usable."""
    counter = await create("main", Counter)

    class Locked:
        def __reduce__(self) -> Any:
            raise Failure("not this one")

    held = Locked()
    with pytest.raises(Failure, match="not this one"):
        await call("main", lambda: (held, counter))
    with pytest.raises(Failure, match="not this one"):
        await remote(RRef(Counter())).add([lambda: counter, held])
    assert await remote(counter).add() == 1


@pytest.mark.usefixtures("world")
async def test_members_of_a_group_get_what_travels_by_value() -> None:
    """The same as one receiver, also beside RRefs and by `each`."""
    counter = await create("main", Counter)
    members = [RRef(Applied()) for _ in range(2)]
    group = aiorpc.Group(members)
    assert await remote(group).apply(lambda x: x + 1, counter) == [2, 2]
    given = aiorpc.each([lambda x: x + 2, lambda x: x + 3])
    assert await remote(group).apply(given, counter) == [3, 4]
    assert [found async for found in group.map(Applied.run, [lambda: 5, lambda: 6])] == [5, 6]


class Applied:
    async def apply(self, function: Any, _: Any) -> Any:
        return function(1)

    async def run(self, function: Any) -> Any:
        return function()
