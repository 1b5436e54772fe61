"""Batches on a device: stacked, computed and fetched there, while the loop goes on."""

import asyncio
from typing import Any

import pytest
import torch

from aiorpc_torch import create, remote
from aiorpc_torch._batching.collate import Collation, collate, rows_of, with_rows
from aiorpc_torch._batching.cuda_collate import CudaCollator
from tests.support.cuda_actors import (
    GPU,
    HERE,
    REHEARSED,
    SIZE,
    Actor,
    fails_without,
    gpu_world,
    late,
    needs_device,
    on_a_loop,
    warm_actor,
)

pytestmark = GPU


@pytest.fixture
def collator() -> CudaCollator:
    return CudaCollator(HERE)


@needs_device
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([torch.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ([1, 2, 3], torch.tensor([1, 2, 3])),
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


@needs_device
def test_arrays(collator: CudaCollator) -> None:
    numpy = pytest.importorskip("numpy")
    with collator.on_stream(collator.record_event()):
        copied, done = collator.to_host(collate([numpy.ones(2, numpy.float32)] * 2, collator))
    done.synchronize()
    assert copied.tolist() == [[1.0, 1.0]] * 2


@needs_device
@pytest.mark.parametrize("device", ["cpu", HERE])
def test_rows(device: Any) -> None:
    """Joined and padded, from pinned memory or on the device; a number is in each row."""
    collator = CudaCollator(HERE, concat=True)
    calls = [(torch.full((count, 2), float(count), device=device), count) for count in (1, 0, 2)]
    with collator.on_stream(collator.record_event()):
        padded = with_rows(calls, rows_of(calls, Collation(concat=True, pad_to=(4,))))
        copied, done = collator.to_host(collate(padded, collator))
    done.synchronize()
    assert copied[0].tolist() == [[1.0] * 2, *[[2.0] * 2] * 3]
    assert copied[1].tolist() == [1, 2, 2, 2]


@needs_device
@fails_without("batch")
def test_tensors_that_are_on_the_device(collator: CudaCollator) -> None:
    """Nothing is copied to the CPU and back. The first time may wait for the device."""
    for values in (range(3), range(3, 6)):
        tensors = [late(float(n), 4) for n in values]
        with collator.on_stream(collator.record_event()):
            copied, done = collator.to_host(collate(tensors, collator))
        done.synchronize()
        assert copied.tolist() == [[float(n)] * 4 for n in values]


@needs_device
def test_gradients_go_through(collator: CudaCollator) -> None:
    """From a row to the result on the CPU."""
    row = torch.ones(3, requires_grad=True)
    with collator.on_stream(collator.record_event()):
        copied, done = collator.to_host(collate([row, row], collator) * 2)
    done.synchronize()
    copied.sum().backward()
    assert row.grad is not None
    assert row.grad.tolist() == [4.0] * 3


@needs_device
def test_pinned_memory_is_not_used_again_too_soon(collator: CudaCollator) -> None:
    """A column's is free for the next when its copy has been made, not when it was queued."""
    with collator.on_stream(collator.record_event()):
        torch.cuda._sleep(200_000_000)
        columns = [collate([torch.full((SIZE,), float(n))] * 2, collator) for n in range(8)]
        copied, done = collator.to_host(columns)
    done.synchronize()
    assert [float(each.mean()) for each in copied] == [float(n) for n in range(8)]


@pytest.mark.promise("devices.batches")
@fails_without("stream")
@on_a_loop
async def test_a_batch() -> None:
    """On a stream of its own, in a thread or step by step on the loop; rows on the CPU."""
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        rows = [torch.full((4,), float(n)) for n in range(8)]
        found = await asyncio.gather(*(actor.double(row, 2.0) for row in rows))
        assert [each.tolist() for each in found] == [[2.0 * n] * 4 for n in range(8)]
        more = await asyncio.gather(*(actor.adouble(row) for row in rows))
        assert [each["sums"].item() for each in more] == [8.0 * n for n in range(8)]
        assert not any(each["found"].is_cuda for each in more)
        noted = await actor.noted_streams()
        assert noted or REHEARSED
        assert all(is_own and priority < 0 for is_own, priority in noted)


@on_a_loop
async def test_generators() -> None:
    """Each step on the batch's stream, in a thread or on the loop; items on the CPU."""
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        for method in (actor.unroll, actor.aunroll):
            streams = (method(torch.full((2,), float(n))) for n in range(3))
            for n, found in enumerate(await asyncio.gather(*map(take, streams))):
                assert [each.tolist() for each in found] == [[float(n * by)] * 2 for by in range(3)]
        assert all(is_own for is_own, _ in await actor.noted_streams())


async def take(items: Any) -> list[Any]:
    return [item async for item in items]


@fails_without("batch")
@on_a_loop
async def test_rows_that_are_there_already() -> None:
    """What callers sent to the device is waited for by the batch's stream.

    The first rounds load kernels and make memory, which may wait for the device.
    """
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        for values in (range(1, 5), range(5, 9), range(9, 13)):
            found = await asyncio.gather(*(actor.adouble(late(float(n), 16)) for n in values))
            assert [each["sums"].item() for each in found] == [32.0 * n for n in values]


@fails_without("delivery")
@on_a_loop
async def test_a_coroutine_that_awaits_a_call() -> None:
    """The result arrives on the loop's stream, and the coroutine goes on on the batch's."""
    async with gpu_world(["a", "b"]):
        (actor, _), (_, other) = await warm_actor("a"), await warm_actor("b")
        await actor.keep(other)
        for value in (1.0, 2.0, 3.0):
            found = await actor.plus_mean_of(torch.ones(2), value)
            assert found.tolist() == [1.0 + value] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@on_a_loop
async def test_a_result_on_another_gpu() -> None:
    """It is copied to the CPU behind the work of that GPU."""
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        for value in (1.0, 2.0):
            assert (await actor.on_another_gpu(torch.full((4,), value))).tolist() == [2 * value] * 4


@on_a_loop
async def test_a_function_that_goes_there_itself() -> None:
    """Its rows come back to the CPU all the same."""
    async with gpu_world(["a"]):
        actor = remote(await create("a", Actor))
        found = await asyncio.gather(*(actor.there(torch.full((2,), float(n))) for n in range(4)))
        assert [each.tolist() for each in found] == [[2.0 * n] * 2 for n in range(4)]


@needs_device
@pytest.mark.promise("devices.batches")
@pytest.mark.parametrize("method", ["double", "adouble", "there"])
@on_a_loop
async def test_the_loop_does_not_wait(method: str) -> None:
    """Others are answered while the device computes."""
    async with gpu_world(["a"]):
        actor: Any = remote(await create("a", Actor))
        more = (2.0,) if method == "double" else ()
        await getattr(actor, method)(torch.ones(4), *more)  # whatever the first call makes
        batch = asyncio.create_task(getattr(actor, method)(torch.ones(4), *more))
        await asyncio.sleep(0)
        for _ in range(5):
            assert await actor.quick() == "here"
        assert not batch.done()
        await batch


@on_a_loop
async def test_a_function_that_raises() -> None:
    async with gpu_world(["a"]):
        actor = remote(await create("a", Actor))
        with pytest.raises(LookupError, match=str(HERE)):
            await actor.fails(torch.ones(1))
        assert (await actor.adouble(torch.ones(1)))["found"].tolist() == [2.0]
