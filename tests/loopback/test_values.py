"""Values that are sent: views, subclasses of tensors, and what is changed after the call."""

import asyncio
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import aiorpc_torch as aiorpc
from aiorpc_torch import call


def same(value: Any) -> Any:
    return value


@pytest.mark.promise("transport.views")
@pytest.mark.hypothesis  # which its plugin cannot see in a function of a test
def test_views_arrive_as_what_they_show() -> None:
    """Transposed, sliced and expanded views."""

    @given(st.lists(st.integers(1, 4), max_size=4), st.randoms())
    def check(shape: list[int], random: Random) -> None:
        dims = list(range(len(shape)))
        random.shuffle(dims)
        tensor = torch.randn(shape).permute(dims)
        for view in (
            tensor,
            tensor[..., :1] if shape else tensor,
            tensor.unsqueeze(0).expand(2, *tensor.shape),
        ):
            arrived = me.run(call("main", same, view))
            assert isinstance(arrived, Tensor)
            assert torch.equal(arrived, view)
            expected = view.clone().stride()  # those of axes of one element mean nothing
            kept = [axis for axis, size in enumerate(view.shape) if size > 1]
            assert [arrived.stride(axis) for axis in kept] == [expected[axis] for axis in kept]

    with aiorpc.in_thread(aiorpc.local_world(0)) as me:
        check()


@pytest.mark.usefixtures("world")
async def test_subclasses_stay_what_they_are() -> None:
    """A Parameter is a Parameter there."""
    arrived = await call("main", same, {"w": nn.Parameter(torch.ones(2))})
    assert isinstance(arrived["w"], nn.Parameter)


@pytest.mark.promise("transport.copied")
@pytest.mark.usefixtures("world")
async def test_small_tensor_is_copied_at_the_call() -> None:
    """It may be changed as soon as the call is made."""
    tensor = torch.zeros(3)
    calling = asyncio.ensure_future(call("main", same, tensor))
    await asyncio.sleep(0)  # it is made
    tensor.fill_(1)
    assert torch.equal(await calling, torch.zeros(3))
