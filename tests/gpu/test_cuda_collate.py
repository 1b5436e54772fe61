"""Batches on a device: stacked, computed and fetched there, while the loop goes on."""

import asyncio
from typing import Any

import pytest
import torch

from aiorpc_torch import create, remote
from tests.support.cuda_actors import (
    GPU,
    HERE,
    REHEARSED,
    Actor,
    fails_without,
    gpu_world,
    late,
    needs_device,
    on_a_loop,
    warm_actor,
)

pytestmark = GPU


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
