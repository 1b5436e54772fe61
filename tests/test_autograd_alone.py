"""Calls in a distributed autograd context of torch's: each goes by itself, and is recorded."""

import asyncio
from collections.abc import Callable
from typing import Any

import actors
import pytest
import torch
from torch.distributed import autograd

from aiorpc_torch import _link, create, remote
from aiorpc_torch._message import Message, load
from aiorpc_torch.testing import world

pytestmark = pytest.mark.worlds

SEED = 3


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """What blocks until other workers have done their part, with an end to it."""
    async with asyncio.timeout(20.0):
        return await asyncio.to_thread(function, *args)


def in_one_process(x: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of x, scale, weight and bias, without any call."""
    net = actors.make_net(SEED)
    leaves = [x.clone().requires_grad_(), scale.clone().requires_grad_(), net.weight, net.bias]
    (net(leaves[0]) * leaves[1]).sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """The messages with calls, as they leave."""
    found: list[Message] = []
    send = _link.send

    def spy(peer: Any, door: Any, data: bytes, tensors: Any) -> Any:
        message = load(data)
        if message.numbers:
            found.append(message)
        return send(peer, door, data, tensors)

    monkeypatch.setattr(_link, "send", spy)
    return found


async def test_gradients_through_calls(sent: list[Message]) -> None:
    """Those of calls in the context are right at both ends; other calls are no part of it."""
    x, scale = torch.randn(4, 3), torch.randn(4, 2)
    expected = in_one_process(x, scale)
    async with world(["b"], transports=["uv"]):
        net = await create("b", actors.make_net, SEED)
        for method in ("forward", "aforward"):
            await check_gradients(net, method, x, scale, expected, sent)


async def check_gradients(
    net: Any,
    method: str,
    x: torch.Tensor,
    scale: torch.Tensor,
    expected: list[torch.Tensor],
    sent: list[Message],
) -> None:
    forward = getattr(remote(net), method)
    mine, weights = x.clone().requires_grad_(), scale.clone().requires_grad_()
    sent.clear()
    with autograd.context() as context:
        y = await forward(mine)
        assert [(message.context, len(message.numbers)) for message in sent] == [(context, 1)]
        assert y.grad_fn is not None
        # A thread of its own is in no context, so what its loop calls is not recorded.
        elsewhere = await in_thread(asyncio.run, several(forward, x.clone().requires_grad_()))
        assert not any(message.context >= 0 for message in sent[1:])
        assert all(torch.equal(z, y) and z.grad_fn is None for z in elsewhere)

        await in_thread(autograd.backward, context, [(y * weights).sum()])
        here = autograd.get_gradients(context)
        there = await remote(net).gradients(context)
        assert len(here) == 2
        assert len(there) == 2
        for gradient, right in zip((here[mine], here[weights], *there), expected, strict=True):
            torch.testing.assert_close(gradient, right)
        assert mine.grad is None, "gradients are the context's"

    # The context is left: other tasks' calls share messages again, and carry no graph.
    sent.clear()
    after = await several(forward, x.clone().requires_grad_())
    assert not any(message.context >= 0 for message in sent)
    assert len(sent) < len(after)
    assert all(torch.equal(z, y) and z.grad_fn is None for z in after)


async def several(forward: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Calls of several tasks in one turn."""
    async with asyncio.timeout(20.0), asyncio.TaskGroup() as group:
        tasks = [group.create_task(forward(x)) for _ in range(5)]
    return [task.result() for task in tasks]
