"""Strides of tensors, small and large, as torch RPC keeps them."""

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc

from aiorpc_torch import RRef, batched, call, remote

SIZES = pytest.mark.parametrize("size", [11, 301], ids=["small", "large"])


def strides_of(x: Tensor) -> tuple[int, ...]:
    return x.stride()


def give_back(x: Tensor) -> Tensor:
    return x


def flat(x: Tensor) -> Tensor:
    return x.view(-1)


class Server:
    async def strides_of(self, x: Tensor) -> tuple[int, ...]:
        return x.stride()

    @batched(max_size=8)
    def each_strides_of(self, xs: list[Tensor]) -> list[tuple[int, ...]]:
        return [x.stride() for x in xs]

    @batched(max_size=8, stack=True)
    def give_back(self, xs: Tensor) -> Tensor:
        return xs * 2


def views(size: int) -> list[Tensor]:
    side = max(size // 5, 4)
    return [
        torch.rand(size - 1, size).t(),
        torch.rand(2, 3, side, side).to(memory_format=torch.channels_last),
        torch.rand(3, size, side).permute(2, 0, 1),
    ]


@pytest.mark.promise("transport.strides")
@SIZES
@pytest.mark.usefixtures("world")
async def test_tensors_keep_their_strides(size: int) -> None:
    """Of arguments and results, alone, in containers and in many calls at once."""
    server = RRef(Server())
    for x in views(size):
        assert rpc.rpc_sync("main", strides_of, (x,)) == x.stride()
        assert await call("main", strides_of, x) == x.stride()
        back = await call("main", give_back, x)
        assert back.stride() == x.stride()
        assert torch.equal(back, x)
        assert (await call("main", give_back, {"x": [x]}))["x"][0].stride() == x.stride()
        many = await asyncio.gather(*(remote(server).strides_of(x) for _ in range(20)))
        assert {*many} == {x.stride()}


@pytest.mark.usefixtures("world")
async def test_the_memory_of_a_transposed_tensor_is_not_taken_for_its_own() -> None:
    """`view` fails at the callee, as at the caller and by torch RPC."""
    for x in (torch.rand(10, 11).t(), torch.rand(300, 301).t()):
        with pytest.raises(RuntimeError, match="view"):
            await call("main", flat, x)


@pytest.mark.promise("transport.strides")
@pytest.mark.usefixtures("world")
async def test_batches_of_tensors_with_strides() -> None:
    """Each of a batch keeps its own; stacked they are rows of one tensor."""
    server = RRef(Server())
    xs: list[Any] = [torch.rand(3, 4), torch.rand(4, 3).t(), torch.rand(3, 4)]
    found = await asyncio.gather(*(remote(server).each_strides_of(x) for x in xs))
    assert found == [x.stride() for x in xs]
    doubled = await asyncio.gather(*(remote(server).give_back(x) for x in xs))
    assert all(torch.equal(new, x * 2) for new, x in zip(doubled, xs, strict=True))
