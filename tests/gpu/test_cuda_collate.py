"""Batches on a device: stacked, computed and fetched there, while the loop goes on."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from aiorpc_torch import create, remote
from aiorpc_torch._batching.collate import collate
from aiorpc_torch._batching.cuda_collate import CudaCollator
from aiorpc_torch.testing import world
from tests.support.cuda_actors import GPU, HERE, SIZE, Actor, late

pytestmark = GPU


@pytest.fixture
def collator() -> CudaCollator:
    return CudaCollator(HERE)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([torch.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ([1, 2, 3], torch.tensor([1, 2, 3])),
        ([np.ones(2, np.float32)] * 2, torch.ones(2, 2)),
        ([torch.empty(0)] * 2, torch.empty(2, 0)),
        ([torch.tensor(1.0, dtype=torch.bfloat16)], torch.ones(1, dtype=torch.bfloat16)),
    ],
)
def test_parameters(collator: CudaCollator, values: list[Any], expected: torch.Tensor) -> None:
    with collator.on_stream(collator.record_event()):
        column = collate(values, collator)
        copied, done = collator.to_host({"x": column, "n": 3})
    assert column.device == HERE
    done.synchronize()
    assert copied["n"] == 3
    assert not copied["x"].is_cuda
    torch.testing.assert_close(copied["x"], expected)


def test_tensors_that_are_on_the_device(collator: CudaCollator) -> None:
    """Nothing is copied to the CPU and back."""
    tensors = [late(float(n), 4) for n in range(3)]
    with collator.on_stream(collator.record_event()):
        copied, done = collator.to_host(collate(tensors, collator))
    done.synchronize()
    assert copied.tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]


def test_gradients_go_through(collator: CudaCollator) -> None:
    """From a row to the result on the CPU."""
    row = torch.ones(3, requires_grad=True)
    with collator.on_stream(collator.record_event()):
        copied, done = collator.to_host(collate([row, row], collator) * 2)
    done.synchronize()
    copied.sum().backward()
    assert row.grad is not None
    assert row.grad.tolist() == [4.0] * 3


def test_pinned_memory_is_not_used_again_too_soon(collator: CudaCollator) -> None:
    """A column's is free for the next when its copy has been made, not when it was queued."""
    with collator.on_stream(collator.record_event()):
        torch.cuda._sleep(200_000_000)
        columns = [collate([torch.full((SIZE,), float(n))] * 2, collator) for n in range(8)]
        copied, done = collator.to_host(columns)
    done.synchronize()
    assert [float(each.mean()) for each in copied] == [float(n) for n in range(8)]


@pytest.mark.promise("devices.batches")
async def test_a_batch() -> None:
    """On a stream of its own, in a thread or step by step on the loop; rows on the CPU."""
    async with world(["a"], device_maps="auto"):
        actor = await create("a", Actor)
        rows = [torch.full((4,), float(n)) for n in range(8)]
        found = await asyncio.gather(*(remote(actor).double(row, 2.0) for row in rows))
        assert [each.tolist() for each in found] == [[2.0 * n] * 4 for n in range(8)]
        more = await asyncio.gather(*(remote(actor).adouble(row) for row in rows))
        assert [each["sums"].item() for each in more] == [8.0 * n for n in range(8)]
        assert not any(each["found"].is_cuda for each in more)
        apart = await remote(actor).apart()
        assert apart
        assert all(apart)


async def test_rows_that_are_there_already() -> None:
    """What callers sent to the device is waited for by the batch's stream."""
    async with world(["a"], device_maps="auto"):
        actor = remote(await create("a", Actor))
        found = await asyncio.gather(*(actor.adouble(late(float(n), 16)) for n in range(4)))
        assert [each["sums"].item() for each in found] == [32.0 * n for n in range(4)]


async def test_a_function_that_goes_there_itself() -> None:
    """Its rows come back to the CPU all the same."""
    async with world(["a"], device_maps="auto"):
        actor = remote(await create("a", Actor))
        found = await asyncio.gather(*(actor.there(torch.full((2,), float(n))) for n in range(4)))
        assert [each.tolist() for each in found] == [[2.0 * n] * 2 for n in range(4)]


@pytest.mark.promise("devices.batches")
@pytest.mark.parametrize("method", ["double", "adouble", "there"])
async def test_the_loop_does_not_wait(method: str) -> None:
    """Others are answered while the device computes."""
    async with world(["a"], device_maps="auto"):
        actor: Any = remote(await create("a", Actor))
        more = (2.0,) if method == "double" else ()
        await getattr(actor, method)(torch.ones(4), *more)  # whatever the first call makes
        batch = asyncio.create_task(getattr(actor, method)(torch.ones(4), *more))
        await asyncio.sleep(0)
        for _ in range(5):
            assert await actor.quick() == "here"
        assert not batch.done()
        await batch


async def test_a_function_that_raises() -> None:
    async with world(["a"], device_maps="auto"):
        actor = remote(await create("a", Actor))
        with pytest.raises(LookupError, match="cuda:0"):
            await actor.fails(torch.ones(1))
        assert (await actor.adouble(torch.ones(1)))["found"].tolist() == [2.0]
