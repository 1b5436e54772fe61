"""Tensors on sockets between two nodes, where torch's RPC has no agent that could carry them."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch import Tensor

from aiorpc_torch import WorkerLost, call
from aiorpc_torch._carrier import tensor_sockets
from aiorpc_torch._carrier.tensor_sockets import TensorSockets
from aiorpc_torch._carrier.transfers import CHUNK
from aiorpc_torch._torch.compat import has_agent
from tests.support.two_ends import SOON, SocketPairs, TwoEnds, two_ends, until

LARGE = CHUNK  # elements of float32: four chunks
pytestmark = pytest.mark.usefixtures("over_sockets")


async def links(ends: TwoEnds) -> tuple[TensorSockets, TensorSockets]:
    """Both ends of a connection, which may use sockets."""
    assert await call("far", abs, -1) == 1
    near, far = ends.connection.carriers.sockets, ends.session.carriers.sockets
    await until(lambda: near.can_send and far.can_send)
    return near, far


async def counted(x: Tensor) -> AsyncIterator[Tensor]:
    """To be called: yields large items."""
    for number in range(3):
        yield x + number


async def test_large_tensors_need_no_agent() -> None:
    """Arguments, results and items of streams."""
    assert not has_agent()
    async with two_ends() as ends:
        near, far = await links(ends)
        x = torch.rand(LARGE)
        assert await call("far", torch.numel, x) == LARGE
        assert torch.equal(await call("far", torch.add, x, x), x + x)
        items = [item async for item in call("far", counted, x)]
        assert [torch.equal(item, x + n) for n, item in enumerate(items)] == 3 * [True]
        assert (near.sent, far.sent) == (3, 4)


async def test_sockets_that_fail_after_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent any more that would notice it: the calls end all the same."""
    swallowing: list[socket.socket] = []

    async def dial(*_: Any) -> socket.socket:
        near, far = socket.socketpair()
        swallowing.append(far)
        return near

    monkeypatch.setattr(tensor_sockets, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(SocketPairs, "dial", dial)
    async with two_ends() as ends:
        near, _ = await links(ends)
        waiting = asyncio.ensure_future(call("far", torch.numel, torch.rand(40_000)))
        await until(lambda: [job for job in near._jobs.values() if job.is_complete])
        await until(lambda: len(swallowing) == 2)
        for each in swallowing:
            each.close()
        with pytest.raises(WorkerLost) as raised:
            await asyncio.wait_for(waiting, SOON)
        assert not raised.value.may_have_run


async def test_sockets_that_fail_while_they_are_idle() -> None:
    """Others are opened for the next tensors; no call ends."""
    async with two_ends() as ends:
        near, far = await links(ends)
        x = torch.rand(LARGE)
        assert await call("far", torch.numel, x) == LARGE
        first, receiver = near._sender, far._receiver
        assert first is not None
        assert receiver is not None
        for each in [*receiver._sockets]:
            each.shutdown(socket.SHUT_RDWR)
        await until(first.has_failed)
        assert await asyncio.wait_for(call("far", torch.numel, x), SOON) == LARGE
        assert near._sender is not first
