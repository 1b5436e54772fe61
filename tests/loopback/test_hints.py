"""Errors of frequent mistakes say what to write instead."""

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from aiorpc_torch import (
    Group,
    RRef,
    batched,
    call,
    create,
    fetch,
    members,
    register,
    remote,
    supervised,
)
from aiorpc_torch.types import LocalWorker, Supervised

pytestmark = pytest.mark.usefixtures("world")


class Model:
    size = 3

    def double(self, x: int) -> int:
        return 2 * x

    def rows(self) -> Iterator[int]:
        yield 1

    async def pages(self) -> AsyncIterator[int]:
        yield 1

    def through(self, rref: Any) -> int:
        return rref.double(1)  # type: ignore[no-any-return]

    @batched(max_size=4)
    def relu(self, xs: Any) -> Any:
        return torch.relu(xs)

    @batched(max_size=4)
    def product(self, xs: Any) -> Any:
        return torch.ones(2) @ xs

    @batched(max_size=4)
    def best(self, xs: Any) -> Any:
        return xs.argmax(1)

    @batched(max_size=4)
    def broken(self, xs: Any) -> Any:
        raise TypeError("list")


def notes(error: pytest.ExceptionInfo[BaseException]) -> str:
    return "\n".join(error.value.__notes__)


async def test_a_method_that_is_not_called() -> None:
    model = RRef(Model())
    assert repr(remote(model).size) == "<remote method size>"
    with pytest.raises(TypeError, match=r"size was not called: write `await remote\(rref\).size"):
        await remote(model).size  # type: ignore[misc]


async def test_a_timeout_among_the_arguments() -> None:
    model = RRef(Model())
    with pytest.raises(TypeError) as error:
        await remote(model).double(1, timeout=5)
    assert "aiorpc_torch.timeout(5)" in notes(error)
    with pytest.raises(TypeError) as error:
        await call("main", int, 1, 2, 3)
    assert not hasattr(error.value, "__notes__")


@pytest.mark.parametrize("method", ["relu", "product", "best"])
async def test_a_batch_that_is_not_stacked(method: str) -> None:
    model = RRef(Model())
    with pytest.raises((TypeError, AttributeError)) as error:
        await getattr(remote(model), method)(torch.ones(2))
    assert "stack=True" in notes(error)


async def test_another_error_of_a_batch() -> None:
    with pytest.raises(TypeError) as error:
        await remote(RRef(Model())).broken(torch.ones(2))
    assert "stack=True" not in "".join(getattr(error.value, "__notes__", []))


async def test_a_task_is_named_by_its_call() -> None:
    task = asyncio.ensure_future(remote(RRef(Model())).double(1))
    assert "coro=<call of double()>" in repr(task)
    assert await task == 2


async def test_a_peer_that_is_no_name(world: LocalWorker) -> None:
    """Of a worker that is to be started, stopped or awaited: of another type, or unknown."""
    lists: Any = ["a"]
    with pytest.raises(TypeError, match="a worker's name must be a str, got"):
        await world.start(lists)
    with pytest.raises(TypeError, match="a worker's name must be a str, got"):
        await world.stop(lists)
    with pytest.raises(ValueError, match=r"peer must be one of \(no peer\), got \['a'\]"):
        await world.wait_for(lists)
    with pytest.raises(ValueError, match=r"until must be one of \(no peer\), got \['a'\]"):
        await world.serve(lists)
    with pytest.raises(TypeError, match="count must be an int, got 'a'"):
        await members("a").wait(lists[0])


# ── what is no method ─────────────────────────────────────────────────────────────────────────────


async def handles() -> list[Any]:
    made = Group(await create(["main", "main"], Model))
    return [remote(each) for each in (made[0], made, made.any())]


async def test_parts_of_an_object() -> None:
    for handle in await handles():
        with pytest.raises(
            AttributeError, match=r"'size.bit_count' is not a method.*call\(rref, f"
        ):
            handle.size.bit_count()
        with pytest.raises(TypeError, match=r"'rows\[...\]' is not a method.*call\(rref, f, x\)"):
            handle.rows[0]
        assert not hasattr(handle.size, "_private")


async def test_habits_of_other_libraries() -> None:
    for handle in await handles():
        with pytest.raises(AttributeError, match=r"write `await remote\(rref\).double\(\.\.\.\)`"):
            handle.double.remote(1)
        with pytest.raises(TypeError, match="write `async for"):
            async for _ in handle.rows:
                pass
        made = handle.double(1)
        with pytest.raises(AttributeError, match=r"`await` <call of .*double.*> first"):
            made.result()
        with pytest.raises(TypeError, match=r"write `async for` for a generator's items"):
            iter(made)
        made.close()


# ── forgotten `await`s and `remote`s ──────────────────────────────────────────────────────────────


async def test_a_call_that_is_not_awaited() -> None:
    model = RRef(Model())
    for made in (remote(model).double(1), remote(model, retries=1).double(1)):
        assert repr(made) == "<call of double, not sent: await it>"
        with pytest.raises(TypeError, match=r"cannot be sent, only its result can: `await` the"):
            await remote(model).double(made)
        assert await made == 2
        assert repr(made) == "<call of double>"
    with pytest.warns(RuntimeWarning, match="^<call of double> was never awaited$"):
        remote(model).double(1)


async def test_a_coroutine_in_place_of_its_result(world: LocalWorker) -> None:
    made: Any = create("main", Model)
    wrong: Any = remote
    hint = r"was not awaited: write `await create\(\.\.\.\)`"
    for attempt in (
        lambda: wrong(made),
        lambda: call(made, Model.double, 1),
        lambda: Group([made]),
        lambda: register("model", made),
    ):
        with pytest.raises(TypeError, match=hint):
            attempt()
    for coroutine in (fetch(made), create(made, Model.double, 1), create("main", made)):
        with pytest.raises(TypeError, match=hint):
            await coroutine
    with pytest.raises(TypeError) as error:
        await call("main", repr, made)
    assert "`await` it first" in notes(error)
    await made


async def test_a_forgotten_remote() -> None:
    group = await create(["main"], Model)
    model: Any = group[0]
    missing = "object has no attribute 'double'"
    for each in (group, group.any(), members("model")):
        with pytest.raises(
            AttributeError, match=rf"{missing}: .* `await remote\(...\).double\(\)`"
        ):
            each.double(1)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=missing) as error:
        await remote(model).through(model)
    assert "write `await remote(rref).double()`" in notes(error)


async def test_a_forgotten_remote_of_a_supervised_object() -> None:
    found = object.__new__(Supervised)
    with pytest.raises(AttributeError, match=r"write `await remote\(\.\.\.\).double\(\)`"):
        found.double(1)


# ── factories ─────────────────────────────────────────────────────────────────────────────────────


class Net(torch.nn.Module):
    def forward(self, x: int = 1) -> int:
        return x


@pytest.mark.promise("calls.instances")
@pytest.mark.parametrize("made", [Net(), Model(), 3])
async def test_an_object_in_place_of_its_class(made: Any) -> None:
    for make in (create, supervised):
        with pytest.raises(TypeError, match=r"must be callable and make the object.*pass a class"):
            await make("main", made)


async def test_callables_that_make_objects() -> None:
    class Maker:
        def __call__(self, size: int) -> list[int]:
            return [0] * size

    maker = Maker()
    for factory in (maker, maker.__call__, functools.partial(maker)):
        assert await fetch(await create("main", factory, 2)) == [0, 0]


async def test_a_call_whose_function_was_called() -> None:
    value: Any = sum([1])
    with pytest.raises(TypeError, match=r"must be callable, got 1: pass the function and its arg"):
        call("main", value)


# ── generators ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["rows", "pages"])
async def test_a_generator_that_is_awaited(method: str) -> None:
    with pytest.raises(TypeError) as error:
        await getattr(remote(RRef(Model())), method)()
    assert "a generator; use `async for`, not `await`" in notes(error)


async def test_a_method_that_is_iterated() -> None:
    with pytest.raises(TypeError, match=r"is not a generator, it returned int: use `await`"):
        async for _ in remote(RRef(Model())).double(1):
            pass


# ── where there is no loop, no row and no number ────────────────────────────────────────────────


class StartsTask:
    """An object whose constructor needs an event loop."""

    def __init__(self) -> None:
        self.task = asyncio.get_running_loop().create_future()


async def test_a_constructor_that_needs_the_event_loop() -> None:
    """The error says what to write, which works."""
    with pytest.raises(RuntimeError, match="no running event loop") as raised:
        await create("main", StartsTask)
    assert any("`async def` function that returns it" in each for each in raised.value.__notes__)

    async def make() -> StartsTask:
        return StartsTask()

    await create("main", make)


async def test_a_weight_that_is_no_number() -> None:
    @batched(max_size=2, weight=lambda x: x.sum(), max_weight=3)
    async def total(xs: list[Any]) -> list[Any]:
        return xs

    with pytest.raises(ValueError, match=r"must be a number, got tensor\(2\.\): return float"):
        await total(torch.ones(2))


async def test_what_is_only_iterated() -> None:
    """A map and a batched generator that are awaited, or iterated by a plain `for`."""

    @batched(max_size=2)
    async def generate(items: list[int]) -> Any:
        yield items

    rref = await create("main", Model)
    for iterated in (generate(1), Group([rref]).map(Model.double, [1])):
        with pytest.raises(TypeError, match="cannot be awaited: write `async for`"):
            await iterated
        with pytest.raises(TypeError, match="cannot be iterated with `for`: write `async for`"):
            list(iterated)
    with pytest.raises(TypeError, match=r"has no indices: take `Group\(members\)\[0\]`"):
        members("x")[0]
