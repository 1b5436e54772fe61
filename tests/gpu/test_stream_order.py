"""Tensors on a device, from worker to worker: what makes them comes before what uses them."""

import asyncio
from typing import Any

import pytest
import torch

from aiorpc_torch import RRef, autograd, create, fetch, remote
from aiorpc_torch._torch.cuda import StreamFence
from aiorpc_torch.testing import world
from tests.support.cuda_actors import GPU, HERE, SIZE, Actor, Layer, late, on_a_stream

pytestmark = GPU


@pytest.mark.promise("devices.order")
@pytest.mark.parametrize("method", ["make", "amake"])
@pytest.mark.parametrize("where", ["a", "main"])
async def test_results(method: str, where: str) -> None:
    """Of a thread and of the loop, from another process and from this one."""
    async with world(["a"], device_maps="auto"):
        actor: Any = remote(await create(where, Actor))
        for value in (1.0, 2.0, 3.0):
            found = await getattr(actor, method)(value)
            assert found.device == HERE
            assert float(found.double().sum()) == value * SIZE


@pytest.mark.promise("devices.order")
@pytest.mark.parametrize("method", ["total", "atotal"])
@pytest.mark.parametrize("made", [late, on_a_stream])
async def test_arguments(method: str, made: Any) -> None:
    """Alone, and as many at once."""
    async with world(["a"], device_maps="auto"):
        actor: Any = remote(await create("a", Actor))
        assert float(await getattr(actor, method)(made(3.0))) == 3.0 * SIZE
        found = await asyncio.gather(*(getattr(actor, method)(made(n)) for n in range(4)))
        assert [float(each) for each in found] == [n * SIZE for n in range(4)]


async def test_without_the_fence_they_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """So these tests would see it."""
    async with world(device_maps="auto"):
        actor = remote(await create("main", Actor))
        monkeypatch.setattr(StreamFence, "wait", lambda _: None)
        found = [float(await actor.atotal(late(3.0))) for _ in range(5)]
        assert any(each != 3.0 * SIZE for each in found)


async def test_nests_and_two_hops() -> None:
    async with world(["a", "b"], device_maps="auto"):
        a, b = await create("a", Actor), await create("b", Actor)
        found = (await remote(a).make_many(5.0))["some"]
        assert float(found[0].double().sum()) == 5.0 * SIZE
        assert found[1].tolist() == [1.0] * 3
        more, less = await remote(a).both({"x": late(4.0)}, late(1.0))
        assert (float(more.mean()), float(less.mean())) == (5.0, 3.0)
        assert float(await remote(a).ask(b, late(1.0))) == 2.0 * SIZE


async def test_items_of_a_stream() -> None:
    """Each is what it was when it was yielded, though the generator fills one buffer."""
    async with world(["a"], device_maps="auto"):
        actor = remote(await create("a", Actor))
        means = [float(item.mean()) async for item in actor.items(6)]
        assert means == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


async def test_memory_is_not_used_again_too_soon() -> None:
    """Of tensors that their callers drop while the device has yet to read them."""
    async with world(["a"], device_maps="auto"):
        actor = remote(await create("a", Actor))
        calls = []
        for value in range(40):
            calls.append(
                asyncio.create_task(actor.atotal(torch.full((SIZE,), float(value), device=HERE)))
            )
            if value % 8 == 7:
                await calls[-1]
        assert [float(await call) for call in calls] == [value * SIZE for value in range(40)]


async def test_one_side_has_a_map() -> None:
    """The caller's: results come back where it leads."""
    async with world(["a"], device_maps={"a": {"cuda:0": "cuda:0"}}):
        actor = await create("a", Actor)
        assert await remote(actor).where(torch.ones(1, device=HERE)) == "cuda:0"
        assert (await remote(actor).amake(1.0)).device == HERE
        assert (await fetch(await create("a", torch.ones, 3, device="cuda:0"))).device == HERE


@pytest.mark.promise("devices.without_map")
async def test_without_a_map() -> None:
    """It is said where the tensor is sent from, and nothing else is disturbed."""
    async with world(["a"]):
        actor = remote(await create("a", Actor))
        quick = asyncio.create_task(actor.quick())
        with pytest.raises(ValueError, match="a tensor on cuda:0 cannot be sent to worker 'a'"):
            await actor.where(torch.ones(1, device=HERE))
        with pytest.raises(ValueError, match="a tensor on cuda:0 cannot be sent to worker 'a'"):
            await actor.both({"x": torch.ones(1)}, torch.ones(1, device=HERE))
        with pytest.raises(ValueError, match="a tensor on cuda:0 cannot be sent to worker 'main'"):
            await actor.amake(1.0)
        assert await quick == "here"


async def test_maps_to_devices_that_are_not_there() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"maps its cuda:0 to cuda:{count} of 'a', but 'a' has"):
        async with world(["a"], device_maps={"a": {0: count}}):
            pass


async def test_gradients() -> None:
    """Through two workers on the device, equal to those of the uncut model."""
    async with world(["a", "b"], device_maps="auto"):
        layers = [await create("a", Layer, 1), await create("b", Layer, 2)]
        x = torch.randn(4, 8, device=HERE, requires_grad=True)
        async with autograd.context() as context:
            hidden = await remote(layers[0]).run(x)
            loss = (await remote(layers[1]).run(hidden)).square().mean()
            await context.backward([loss], timeout=60)
            found = (await context.gradients())[x]
        whole = [Layer(1), Layer(2)]
        y = x.detach().requires_grad_()
        (await whole[1].run(await whole[0].run(y))).square().mean().backward()
        torch.testing.assert_close(found, y.grad)


async def test_an_own_object() -> None:
    """Calls of this worker's own object copy as calls of others do."""
    async with world(device_maps="auto"):
        actor = RRef(Actor())
        given = late(2.0)
        assert float(await remote(actor).atotal(given)) == 2.0 * SIZE
