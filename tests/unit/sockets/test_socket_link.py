"""Tensors on sockets between two nodes, where torch's RPC has no agent that could carry them."""

from collections.abc import AsyncIterator

import pytest
import torch
from torch import Tensor

from aiorpc_torch import call
from aiorpc_torch._sockets.transfers import CHUNK
from aiorpc_torch._torch.compat import has_agent
from tests.support.two_ends import two_ends, until

LARGE = CHUNK  # elements of float32: four chunks


async def counted(x: Tensor) -> AsyncIterator[Tensor]:
    """To be called: yields large items."""
    for number in range(3):
        yield x + number


@pytest.mark.usefixtures("over_sockets")
async def test_large_tensors_need_no_agent() -> None:
    """Arguments, results and items of streams."""
    assert not has_agent()
    async with two_ends() as ends:
        assert await call("far", abs, -1) == 1
        near, far = ends.connection._links.sockets, ends.session._links.sockets
        await until(lambda: near.can_send and far.can_send)
        x = torch.rand(LARGE)
        assert await call("far", torch.numel, x) == LARGE
        assert torch.equal(await call("far", torch.add, x, x), x + x)
        items = [item async for item in call("far", counted, x)]
        assert [torch.equal(item, x + n) for n, item in enumerate(items)] == 3 * [True]
        assert (near.sent, far.sent) == (3, 4)
