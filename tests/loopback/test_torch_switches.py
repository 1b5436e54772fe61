"""What torch keeps for a thread, or for a type, and calls do not carry: a warning, not silence."""

import functools
import warnings
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiorpc_torch import Group, RRef, batched, call, create, each, remote
from aiorpc_torch.autograd import context
from tests.support.tensor_kinds import LARGE, Labelled, ramp

pytestmark = pytest.mark.usefixtures("world")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, *xs: Any) -> Tensor:
        return torch.stack([(x * self.weight).sum() for x in xs]).sum()

    async def parts(self) -> list[Tensor]:
        return [self.weight]

    async def echo(self, x: Any) -> Any:
        return x

    @torch.no_grad()
    async def without_gradients(self) -> bool:
        return torch.is_grad_enabled()

    @torch.inference_mode()
    async def in_inference(self) -> AsyncIterator[bool]:
        yield torch.is_inference_mode_enabled()

    @torch.autocast("cpu", dtype=torch.bfloat16)
    async def cast(self) -> bool:
        return torch.is_autocast_enabled("cpu")

    @torch.no_grad()
    def plain(self) -> bool:
        return torch.is_grad_enabled()

    @torch.no_grad()
    def rows(self) -> Iterator[bool]:
        yield torch.is_grad_enabled()

    async def with_block(self) -> bool:
        with torch.no_grad():
            return torch.is_grad_enabled()


@torch.no_grad()
async def function() -> bool:
    return torch.is_grad_enabled()


async def items(stream: Any) -> list[Any]:
    return [item async for item in stream]


# ── decorators ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("calls.switches")
async def test_decorators_of_coroutine_functions() -> None:
    model = RRef(Model())
    for made in (
        remote(model).without_gradients(),
        items(remote(model).in_inference()),
        remote(model).cast(),
        call("main", function),
        call(model, Model.without_gradients),
        create("main", function),
    ):
        with pytest.warns(UserWarning, match=r"is an `async def`.*write `with torch.no_grad\(\):"):
            await made


def test_decorators_of_batched_coroutine_functions() -> None:
    with pytest.warns(UserWarning, match=r"double is an `async def`"):

        @batched(max_size=2)
        @torch.no_grad()
        async def double(xs: list[int]) -> list[int]:
            return [2 * x for x in xs]


@torch.no_grad()
@batched(max_size=2)
async def triple(xs: list[int]) -> list[int]:
    return [3 * x for x in xs]


async def test_decorators_around_batched() -> None:
    with pytest.warns(UserWarning, match=r"triple is an `async def`"):
        assert await call("main", triple, 1) == 3


class Agent:
    @torch.no_grad()
    @batched(max_size=2, stack=True)
    def act(self, states: Tensor) -> Tensor:
        return states


async def test_a_decorator_around_a_batched_method() -> None:
    with (
        pytest.warns(UserWarning, match=r"act is .*`@batched`, on which"),
        pytest.raises(TypeError, match="write @batched above"),
    ):
        await remote(RRef(Agent())).act(torch.ones(2))


async def echo(x: int) -> int:
    return x


def wrapped_around_itself(x: int) -> int:
    return x


wrapped_around_itself.__wrapped__ = wrapped_around_itself  # type: ignore[attr-defined]
around_a_partial = torch.no_grad()(functools.partial(echo))


async def test_decorators_of_odd_functions() -> None:
    """A partial has no name of its own, and a function may be its own `__wrapped__`."""
    with pytest.warns(UserWarning, match=r"a partial is an `async def`"):
        assert await call("main", around_a_partial, 1) == 1
    assert await call("main", wrapped_around_itself, 1) == 1


async def test_decorators_that_have_their_effect() -> None:
    model = RRef(Model())
    assert not await remote(model).plain()
    assert await items(remote(model).rows()) == [False]
    assert not await remote(model).with_block()


# ── autocast ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("calls.switches")
@pytest.mark.parametrize("way", ["large", "group", "in a context"])
async def test_autocast_of_the_caller(way: str) -> None:
    model = RRef(Model())

    async def attempt() -> Any:
        if way == "group":
            return await remote(Group([model, model])).echo(torch.ones(LARGE))
        if way == "large":
            return await remote(model).echo(torch.ones(LARGE))
        async with context():
            return await remote(model).forward(torch.ones(3))

    await attempt()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.warns(UserWarning, match=r"autocast holds for this thread only.*in the method"),
    ):
        await attempt()


# ── subclasses in autograd contexts ───────────────────────────────────────────────────────────────


LOST = r"to which no gradient returns.*Send its `.as_subclass\(torch.Tensor\)`"


@pytest.mark.promise("autograd.subclasses")
@pytest.mark.parametrize("kind", [nn.Parameter, Labelled])
async def test_subclasses_as_arguments(kind: Any) -> None:
    model = RRef(Model())
    x = torch.ones(3).as_subclass(kind).requires_grad_()
    group: Any = remote(Group([model, model]))

    async def lossy(made: Awaitable[Any]) -> None:
        with pytest.warns(UserWarning, match=rf"forward is or holds a {kind.__name__}, {LOST}"):
            await made

    async with context():
        await lossy(remote(model).forward(x))
        await lossy(remote(model).forward(torch.ones(3), x))
        await lossy(group.forward(x))
        await lossy(group.forward(x, each([1, 2])))
        with pytest.warns(UserWarning, match=LOST):
            await remote(model).echo([x])
    async with context() as ctx:
        loss = await remote(model).forward(x.as_subclass(Tensor))
        await ctx.backward([loss])
        assert x in await ctx.gradients()


@pytest.mark.promise("autograd.subclasses")
async def test_subclasses_in_results() -> None:
    model = RRef(Model())
    async with context():
        with pytest.warns(UserWarning, match=rf"result of Model.parts is or holds a Param.*{LOST}"):
            await remote(model).parts()


async def test_subclasses_that_lose_nothing() -> None:
    """Outside of contexts, and without a gradient."""
    model = RRef(Model())
    x = nn.Parameter(ramp(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await remote(model).forward(x)
        await remote(model).parts()
        async with context():
            await remote(model).forward(nn.Parameter(ramp(3), requires_grad=False))
            await remote(model).echo(ramp(3).as_subclass(Labelled))


# ── a backward of torch's own ─────────────────────────────────────────────────────────────────────


@pytest.mark.promise("autograd.plain_backward")
async def test_a_plain_backward_in_a_context() -> None:
    model = RRef(Model())

    async def train() -> None:
        async with context():
            loss = await remote(model).forward(torch.ones(3))
            loss.backward()

    with pytest.raises(RuntimeError, match="INTERNAL ASSERT") as error:
        await train()
    assert "write `await context.backward([loss])`" in "".join(error.value.__notes__)


async def test_a_root_that_is_not_awaited() -> None:
    made: Any = remote(RRef(Model())).forward(torch.ones(3))
    async with context() as ctx:
        with pytest.raises(
            TypeError, match="roots must be tensors, got <call of forward, not sent"
        ):
            await ctx.backward(made)
        await made
