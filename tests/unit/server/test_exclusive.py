"""`@exclusive` without a world: coroutines that a program awaits itself, and the decorator."""

import asyncio
import functools
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import batched


class Busy:
    """Counts the calls inside it, and notes what began and ended."""

    def __init__(self) -> None:
        self.inside = 0
        self.log: list[Any] = []

    async def work(self, item: Any, steps: int = 2) -> Any:
        self.inside += 1
        assert self.inside == 1
        self.log.append(item)
        try:
            for _ in range(steps):
                await asyncio.sleep(0)
                assert self.inside == 1
        finally:
            self.inside -= 1
        return item


@aiorpc.exclusive
class Inherits(Busy):
    async def twice(self, item: Any) -> list[Any]:
        return [await self.work(item), await self.work(item)]

    async def items(self, count: int) -> AsyncIterator[int]:
        for n in range(count):
            yield await self.work(n)

    @batched(max_size=8)
    async def batch(self, items: list[int]) -> list[int]:
        return [await self.work(item) for item in items]

    async def ask(self, item: int) -> int:
        return await self.batch(item)


class Derived(Inherits):
    async def work(self, item: Any, steps: int = 1) -> Any:
        return await super().work(item, steps)

    async def more(self, item: Any) -> Any:
        return await self.twice(item)


class Mixin(Busy):
    async def work(self, item: Any, steps: int = 2) -> Any:
        return ("mixin", await super().work(item, steps))


class Diamond(Inherits, Mixin):
    pass


@pytest.mark.parametrize("cls", [Inherits, Derived])
async def test_coroutines_take_turns(cls: type[Inherits]) -> None:
    """In the order of their first steps; a method's own calls stay in its turn."""
    busy = cls()
    found = await asyncio.gather(
        busy.work(1), busy.twice(2), busy.batch(3), busy.work(4), busy.batch(5)
    )
    assert found == [1, [2, 2], 3, 4, 5]
    assert sorted(busy.log) == [1, 2, 2, 3, 4, 5]
    assert [item for item in busy.log if item not in (3, 5)] == [1, 2, 2, 4]


async def test_inherited_methods_keep_the_order_of_classes() -> None:
    """A guard of an inherited method does not hide an override from beside it."""
    diamond = Diamond()
    assert await asyncio.gather(diamond.work(1), diamond.work(2)) == [("mixin", 1), ("mixin", 2)]


async def test_an_override_with_the_attributes_of_what_it_overrides() -> None:
    """`functools.wraps` copies those of the guard: the override needs one all the same."""

    class Wraps(Inherits):
        entered = 0

        @functools.wraps(Inherits.work)
        async def work(self, item: Any, steps: int = 2) -> Any:
            self.entered += 1
            entered = self.entered
            found = await super().work(item, steps)
            self.entered -= 1
            return found, entered

    wraps = Wraps()
    assert await asyncio.gather(wraps.work(1), wraps.work(2)) == [(1, 1), (2, 1)]


async def test_a_local_stream_is_one_call() -> None:
    """From its first item to its end; the consumer's own code is no part of it."""
    busy = Inherits()
    stream = busy.items(2)
    assert await anext(stream) == 0
    waiting = asyncio.create_task(busy.work("later"))
    assert await anext(stream) == 1
    assert not waiting.done()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert await waiting == "later"
    assert busy.log == [0, 1, "later"]


async def test_a_stream_that_is_closed_ends_its_turn() -> None:
    busy = Inherits()
    stream: Any = busy.items(2)
    assert await anext(stream) == 0
    await stream.aclose()
    assert await busy.work(1) == 1


@aiorpc.exclusive
class Streams:
    async def echo(self) -> AsyncIterator[Any]:
        """Yield what the consumer sends or throws in."""
        got: Any = "first"
        while True:
            try:
                got = yield got
            except LookupError as exc:
                got = exc

    async def echo_inside(self) -> list[Any]:
        """The same generator in the turn of this call."""
        return await converse(self.echo())

    async def fails_to_close(self) -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            raise LookupError("close")

    async def work(self) -> str:
        return "worked"


async def converse(stream: Any) -> list[Any]:
    found = [await anext(stream), await stream.asend("sent")]
    found.append(str(await stream.athrow(LookupError("thrown"))))
    await stream.aclose()
    return found


async def test_a_local_stream_gets_what_is_sent_and_thrown() -> None:
    """In a turn of its own, and in that of the call which consumes it."""
    streams = Streams()
    expected = ["first", "sent", "thrown"]
    assert await converse(streams.echo()) == expected
    assert await streams.echo_inside() == expected


async def test_inherited_methods_for_torch_clients_take_turns() -> None:
    class Base:
        inside = 0

        @aiorpc.async_execution
        async def for_torch(self) -> int:
            self.inside += 1
            await asyncio.sleep(0)
            self.inside -= 1
            return self.inside

    @aiorpc.exclusive
    class Marked(Base):
        pass

    marked = Marked()
    assert await asyncio.gather(marked.for_torch(), marked.for_torch()) == [0, 0]


async def test_a_batch_of_the_own_object_is_refused() -> None:
    """It would wait for the method that waits for it; others that wait are served."""
    busy = Inherits()
    refused, served = await asyncio.gather(busy.ask(1), busy.batch(2), return_exceptions=True)
    assert isinstance(refused, RuntimeError)
    assert "calls itself" in str(refused)
    assert served == 2


async def test_a_batch_that_every_caller_has_left_is_not_run() -> None:
    busy = Inherits()
    first = asyncio.create_task(busy.work("first", 10))
    await asyncio.sleep(0)
    left: list[Any] = [busy.batch(n) for n in range(3)]
    for _ in range(3):  # the batch waits for its turn
        await asyncio.sleep(0)
    for future in left:
        future.cancel()
    assert await first == "first"
    assert await busy.work("last") == "last"
    assert busy.log == ["first", "last"]


async def test_a_deadline_that_passes_frees_the_place() -> None:
    busy, gate = Inherits(), asyncio.Event()

    @aiorpc.exclusive
    class Gated:
        async def wait(self) -> None:
            await gate.wait()

        async def here(self) -> bool:
            return True

    gated = Gated()
    holds = asyncio.create_task(gated.wait())
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await gated.here()
    gate.set()
    await holds
    assert await gated.here()
    assert await busy.work(1) == 1


async def test_a_task_that_outlives_its_call_waits_again() -> None:
    """While the call runs, its tasks are a part of it; afterwards they are callers as any other."""

    @aiorpc.exclusive
    class Leaves(Busy):
        async def leave(self) -> "asyncio.Task[Any]":
            return asyncio.create_task(self.later())

        async def later(self) -> Any:
            await asyncio.sleep(0)
            return await self.work("left")

    leaves = Leaves()
    task = await leaves.leave()
    found = await asyncio.gather(leaves.work(1, 5), task, leaves.work(2, 5))
    assert found == [1, "left", 2]


async def test_turns_do_not_keep_objects_alive() -> None:
    busy = Inherits()
    await busy.work(1)
    alive = weakref.ref(busy)
    del busy
    gc.collect()
    assert alive() is None


def test_what_cannot_be_exclusive() -> None:
    class Slotted:
        __slots__ = ("items",)

    decorate: Any = aiorpc.exclusive
    with pytest.raises(TypeError, match=r"weak references.*__slots__ of Slotted"):
        decorate(Slotted)
    with pytest.raises(TypeError, match="decorates a class"):
        decorate(lambda: None)


def test_a_class_with_init_subclass_keeps_it() -> None:
    @aiorpc.exclusive
    class Registers:
        names: tuple[str, ...] = ()

        def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            cls.names = (*cls.names, tag)

    class Child(Registers, tag="child"):
        pass

    assert Child.names == ("child",)
    assert Registers.names == ()


async def test_a_stream_that_fails_to_close_ends_its_turn() -> None:
    streams = Streams()
    stream: Any = streams.fails_to_close()
    assert await anext(stream) == 1
    with pytest.raises(LookupError, match="close"):
        await stream.aclose()
    assert await asyncio.wait_for(streams.work(), 30.0) == "worked"


async def test_a_cancelled_coroutine_frees_its_place() -> None:
    """One that waits, and one that holds the turn."""
    busy = Inherits()
    holds, waits, last = (asyncio.create_task(busy.work(n, 10)) for n in range(3))
    await asyncio.sleep(0)
    waits.cancel()
    holds.cancel()
    assert await last == 2
    assert busy.log == [0, 2]
    assert await asyncio.wait_for(busy.work(3), 30.0) == 3
