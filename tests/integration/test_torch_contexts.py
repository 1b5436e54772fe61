"""Calls in a distributed autograd context of torch's: each goes by torch, and is recorded."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import autograd

from aiorpc_torch import create, remote
from aiorpc_torch._client import connection, torch_transfers
from aiorpc_torch._protocol import endpoints
from aiorpc_torch._wire.frames import CALLS, HEADER
from aiorpc_torch._wire.messages import load_calls, load_payload, numbers_of
from aiorpc_torch._wire.payloads import detach_data
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


Sent = list[tuple[int, int]]
"""Of each frame or payload with calls: its context, -1 for none, and how many calls are in it."""


def calls_in(data: bytes) -> Sent:
    """What a write of whole frames adds to the list."""
    found: Sent = []
    while data:
        length, kind = HEADER.unpack_from(data)
        end = HEADER.size + length
        if kind == CALLS:
            found.append((-1, len(numbers_of(load_calls(data[HEADER.size : end])))))
        data = data[end:]
    return found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Frames and payloads with calls, as they leave this process."""
    found: Sent = []
    send, write = torch_transfers.send, connection.Connection.write

    def spy_send(peer: Any, door: Any, data: bytes, tensors: Any = ()) -> Any:
        if door is endpoints.payload:
            _, context, groups = load_payload(detach_data(data, tensors)[0])
            found.append((context, len(numbers_of(groups))))
        return send(peer, door, data, tensors)

    def spy_write(self: connection.Connection, data: bytes) -> None:
        found.extend(calls_in(data))
        write(self, data)

    monkeypatch.setattr(torch_transfers, "send", spy_send)
    monkeypatch.setattr(connection.Connection, "write", spy_write)
    return found


@pytest.mark.promise("autograd.gradients")
@pytest.mark.usefixtures("over_torch")
async def test_gradients_through_calls(sent: Sent) -> None:
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
    sent: Sent,
) -> None:
    forward = getattr(remote(net), method)
    mine, weights = x.clone().requires_grad_(), scale.clone().requires_grad_()
    sent.clear()
    with autograd.context() as context:
        y = await forward(mine)
        assert sent == [(context, 1)]
        assert y.grad_fn is not None
        # A thread of its own is in no context, so what its loop calls is not recorded.
        elsewhere = await in_thread(asyncio.run, several(forward, x.clone().requires_grad_()))
        assert sent[1:] == [(-1, 1)] * 5
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
    sent.clear()
    after = await several(forward, x.clone().requires_grad_())
    assert sent == [(-1, 1)] * 5
    after += await several(forward, x)
    assert sent[5:] in ([(-1, 5)], [(-1, 1), (-1, 4)]), "a first call may leave at once"
    assert all(torch.equal(z, y) and z.grad_fn is None for z in after)


async def several(forward: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Make calls of several tasks in one loop iteration."""
    async with asyncio.timeout(30.0), asyncio.TaskGroup() as group:
        tasks = [group.create_task(forward(x)) for _ in range(5)]
    return [task.result() for task in tasks]
