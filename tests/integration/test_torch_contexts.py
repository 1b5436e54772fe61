"""Calls in a distributed autograd context of torch's: each goes by torch, and is recorded."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import autograd

from aiorpc_torch import create, remote
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import world
from tests.support import actors

SEED = 3


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """What blocks until other workers have done their part, with an end to it."""
    async with asyncio.timeout(30.0):
        return await asyncio.to_thread(function, *args)


def in_one_process(x: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of x, scale, weight and bias, without any call."""
    net = actors.make_net(SEED)
    leaves = [x.clone().requires_grad_(), scale.clone().requires_grad_(), net.weight, net.bias]
    (net(leaves[0]) * leaves[1]).sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def recorded(context: int) -> int:
    """Return how many calls torch has recorded here, as sent."""
    return len(autograd._retrieve_context(context)._send_functions())  # type: ignore[attr-defined]


def sent() -> tuple[int, int]:
    """Return how many messages with calls have left this process, and how many calls."""
    now = stats()
    return now.messages, now.calls


@contextlib.contextmanager
def sends(*expected: tuple[int, int]) -> Iterator[None]:
    """Check that the block sends so many messages with so many calls, one of the alternatives."""
    messages, calls = sent()
    yield
    now = sent()
    assert (now[0] - messages, now[1] - calls) in expected


@pytest.mark.promise("autograd.gradients")
@pytest.mark.usefixtures("over_torch")
async def test_gradients_through_calls() -> None:
    """Those of calls in the context are right at both ends; other calls are no part of it."""
    x, scale = torch.randn(4, 3), torch.randn(4, 2)
    expected = in_one_process(x, scale)
    async with world(["b"], transports=["uv"]):
        net = await create("b", actors.make_net, SEED)
        for method in ("forward", "aforward"):
            await check_gradients(net, method, x, scale, expected)


async def check_gradients(
    net: Any,
    method: str,
    x: torch.Tensor,
    scale: torch.Tensor,
    expected: list[torch.Tensor],
) -> None:
    forward = getattr(remote(net), method)
    mine, weights = x.clone().requires_grad_(), scale.clone().requires_grad_()
    with autograd.context() as context:
        with sends((1, 1)):
            y = await forward(mine)
        assert recorded(context) == 1
        assert y.grad_fn is not None
        # A thread of its own is in no context, so what its loop calls is not recorded.
        with sends((5, 5)):
            elsewhere = await in_thread(asyncio.run, several(forward, x.clone().requires_grad_()))
        assert recorded(context) == 1
        assert all(torch.equal(z, y) and z.grad_fn is None for z in elsewhere)

        await in_thread(autograd.backward, context, [(y * weights).sum()])
        here = autograd.get_gradients(context)
        there = await remote(net).gradients(context)
        assert len(here) == 2
        assert len(there) == 2
        for gradient, right in zip((here[mine], here[weights], *there), expected, strict=True):
            torch.testing.assert_close(gradient, right)
        assert mine.grad is None, "gradients are the context's"

    # The context is left: calls of other tasks share frames again, and carry no graph.
    with sends((5, 5)):
        after = await several(forward, x.clone().requires_grad_())
    # One frame, or two, since a first call may leave at once; and each result is collected by
    # torch, since it is that of a module with parameters.
    with sends((1 + 5, 5), (2 + 5, 5)):
        after += await several(forward, x)
    assert all(torch.equal(z, y) and z.grad_fn is None for z in after)


async def several(forward: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Make calls of several tasks in one loop iteration."""
    async with asyncio.timeout(30.0), asyncio.TaskGroup() as group:
        tasks = [group.create_task(forward(x)) for _ in range(5)]
    return [task.result() for task in tasks]
