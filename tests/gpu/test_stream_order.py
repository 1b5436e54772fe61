"""Tensors on a device, from worker to worker: what makes them comes before what uses them."""

import asyncio
from typing import Any

import pytest
import torch

from aiorpc_torch import RRef, autograd, create, fetch, remote
from tests.support.cuda_actors import (
    GPU,
    HERE,
    SIZE,
    Actor,
    Layer,
    fails_without,
    gpu_world,
    late,
    needs_device,
    on_a_loop,
    on_a_stream,
    warm_actor,
)

pytestmark = GPU


@pytest.mark.promise("devices.order")
@fails_without("results")
@pytest.mark.parametrize("method", ["make", "amake"])
@pytest.mark.parametrize("where", ["a", "main"])
@on_a_loop
async def test_results(method: str, where: str) -> None:
    """Of a thread and of the loop, from another process and from this one."""
    async with gpu_world(["a"]):
        actor, _ = await warm_actor(where)
        for value in (1.0, 2.0, 3.0):
            found = await getattr(actor, method)(value)
            assert found.device == HERE
            assert float(found.double().sum()) == value * SIZE


@pytest.mark.promise("devices.order")
@fails_without("arguments")
@pytest.mark.parametrize("method", ["total", "atotal"])
@pytest.mark.parametrize("made", [late, on_a_stream])
@on_a_loop
async def test_arguments(method: str, made: Any) -> None:
    """Alone, and as many at once."""
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        assert float(await getattr(actor, method)(made(3.0))) == 3.0 * SIZE
        found = await asyncio.gather(*(getattr(actor, method)(made(n)) for n in range(4)))
        assert [float(each) for each in found] == [n * SIZE for n in range(4)]


@fails_without("arguments")
@pytest.mark.parametrize("method", ["add", "aadd"])
@on_a_loop
async def test_calls_of_an_object_are_in_order(method: str) -> None:
    """Whatever kind each is: all run on the default stream, where the state of the object is."""
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        for value in (1.0, 2.0):
            assert await getattr(actor, method)(late(value))
        assert float((await actor.state()).double().sum()) == 3.0 * SIZE


@fails_without("memory")
@on_a_loop
async def test_memory_is_not_used_again_too_soon() -> None:
    """Of tensors that the callee has dropped while its device has yet to read them.

    torch receives on 32 streams in turn, and each has its own memory: so there are more messages.
    The first round makes that memory: an allocation, or a kernel's first launch, may wait for the
    device, and so hide what is missing.
    """
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        for values in (range(80), range(100, 180)):
            await actor.be_busy()
            for value in values:
                await actor.note(torch.full((SIZE,), float(value), device=HERE))
            assert await actor.noted() == [value * SIZE for value in values]


@fails_without("deferred")
@on_a_loop
async def test_a_result_that_waits_for_nested_calls() -> None:
    """In a context the reply is sent by the thread that has the last nested answer."""
    async with gpu_world(["a", "b"]):
        actor, _ = await warm_actor()
        _, other = await warm_actor("b")
        async with autograd.context():
            found = await actor.make_and_ask(other, 4.0)
            assert float(found.double().sum()) == 4.0 * SIZE


@fails_without("results")
@on_a_loop
async def test_items_of_a_stream() -> None:
    """Each is what it was when it was yielded, though the generator fills one buffer."""
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        means = [float(item.mean()) async for item in actor.items(6)]
        assert means == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@fails_without("start")
@on_a_loop
async def test_an_own_object() -> None:
    """Calls of this worker's own object copy as calls of others do."""
    async with gpu_world():
        actor = RRef(Actor())
        given = late(2.0)
        assert float(await remote(actor).atotal(given)) == 2.0 * SIZE
        assert float((await remote(actor).amake(3.0)).double().sum()) == 3.0 * SIZE


@on_a_loop
async def test_nests_and_two_hops() -> None:
    async with gpu_world(["a", "b"]):
        (a, _), (_, b) = await warm_actor("a"), await warm_actor("b")
        found = (await a.make_many(5.0))["some"]
        assert float(found[0].double().sum()) == 5.0 * SIZE
        assert found[1].tolist() == [1.0] * 3
        more, less = await a.both({"x": late(4.0)}, late(1.0))
        assert (float(more.mean()), float(less.mean())) == (5.0, 3.0)
        assert float(await a.ask(b, late(1.0))) == 2.0 * SIZE


# ── forms of tensors ────────────────────────────────────────────────────────────────────────────


@needs_device
@fails_without("aliases")
@on_a_loop
async def test_tensors_that_share_memory_beside_another_device() -> None:
    """Each arrives on its own device, as an argument and as a result."""
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        x = torch.ones(512, 256)  # too large for the connection
        there = torch.full((3,), 2.0, device=HERE)
        expected = [("cpu", (512, 256), 512.0 * 256), ("cpu", (256, 512), 512.0 * 256)]
        expected.append(("cuda:0", (3,), 6.0))
        assert await actor.describe([x, x.T, there]) == expected
        found = await actor.give_back([there, there[:2], x, x.T])
        assert [str(each.device) for each in found] == ["cuda:0", "cuda:0", "cpu", "cpu"]
        assert [float(each.sum()) for each in found] == [6.0, 4.0, 512.0 * 256, 512.0 * 256]


@fails_without("empty")
@on_a_loop
async def test_tensors_without_elements() -> None:
    """Both ways, also views of larger ones."""
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        some = torch.ones(SIZE, 2, device=HERE)  # too large for the way through the host
        given = [some[:0], torch.empty(0, device=HERE), some]
        shapes = [(0, 2), (0,), (SIZE, 2)]
        assert [shape for _, shape, _ in await actor.describe(given)] == shapes
        assert [tuple(each.shape) for each in await actor.give_back(given)] == shapes
        assert (await actor.give_back(some[:0])).device == HERE


@needs_device
@on_a_loop
async def test_sparse_tensors_are_refused() -> None:
    """At the call, and as the result's exception; torch would send them wrongly."""
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        sparse = torch.eye(3, device=HERE).to_sparse()
        with pytest.raises(ValueError, match=r"sparse_coo on cuda:0 cannot be sent in one call"):
            await actor.where(sparse)
        with pytest.raises(ValueError, match=r"sparse_coo on cpu cannot be sent in one call"):
            await actor.where(sparse.cpu(), torch.ones(1, device=HERE))
        assert await actor.where(sparse.cpu()) == ["cpu"]
        assert await actor.where(torch.ones(1, device=HERE)) == ["cuda:0"]


# ── maps ────────────────────────────────────────────────────────────────────────────────────────


@needs_device
@on_a_loop
async def test_one_side_has_a_map() -> None:
    """The caller's: results come back where it leads."""
    async with gpu_world(["a"], device_maps={"a": {"cuda:0": "cuda:0"}}):
        actor = await create("a", Actor)
        assert await remote(actor).where(torch.ones(1, device=HERE)) == ["cuda:0"]
        assert (await remote(actor).amake(1.0)).device == HERE
        assert (await fetch(await create("a", torch.ones, 3, device=str(HERE)))).device == HERE


@needs_device
@pytest.mark.promise("devices.without_map")
@on_a_loop
async def test_without_a_map() -> None:
    """It is said where the tensor is sent from, and nothing else is disturbed."""
    async with gpu_world(["a"], device_maps=None):
        actor: Any = remote(await create("a", Actor))
        quick = asyncio.create_task(actor.quick())
        with pytest.raises(ValueError, match="a tensor on cuda:0 cannot be sent to worker 'a'"):
            await actor.where(torch.ones(1, device=HERE))
        with pytest.raises(ValueError, match="a tensor on cuda:0 cannot be sent to worker 'a'"):
            await actor.both({"x": torch.ones(1)}, torch.ones(1, device=HERE))
        with pytest.raises(ValueError, match="a tensor on cuda:0 cannot be sent to worker 'main'"):
            await actor.amake(1.0)
        assert await quick == "here"


@needs_device
@on_a_loop
async def test_maps_to_devices_that_are_not_there() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"maps its cuda:0 to cuda:{count} of 'a', but 'a' has"):
        async with gpu_world(["a"], device_maps={"a": {0: count}}):
            pass


@on_a_loop
async def test_the_first_message_of_a_fresh_world() -> None:
    """May be one with a tensor on a device, which neither worker has used before."""
    for size in (3, SIZE):
        async with gpu_world(["a"]):
            found = await fetch(await create("a", torch.ones, size, device=str(HERE)))
            assert found.device == HERE
        async with gpu_world(["a"]):
            actor = await create("a", Actor)
            assert await remote(actor).where(torch.ones(size, device=HERE)) == [str(HERE)]


# ── training ────────────────────────────────────────────────────────────────────────────────────


@fails_without("arguments")
@on_a_loop
async def test_a_parameter_server_on_the_device() -> None:
    """Gradients go to the device of the server and weights come back, never over the CPU.

    The weights are those of the same steps in one process.
    """
    async with gpu_world(["a"]):
        actor, _ = await warm_actor()
        alone = torch.zeros(SIZE, device=HERE)
        for step in range(10):
            weights = await actor.state()
            assert weights.device == HERE
            assert await actor.add(late(1.0) - weights / 2 + step)
            alone += 1.0 - alone / 2 + step
        torch.testing.assert_close(await actor.state(), alone)


@on_a_loop
async def test_gradients() -> None:
    """Through two workers on the device, equal to those of the uncut model."""
    async with gpu_world(["a", "b"]):
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


@on_a_loop
async def test_absent_gradients() -> None:
    """A result that is not used has none: zeros would become NaN where it was computed."""
    async with gpu_world(["a"]):
        layer = await create("a", Layer, 1)
        x = torch.ones(4, device=HERE, requires_grad=True)
        async with autograd.context() as context:
            used, _ = await remote(layer).halves(x)
            await context.backward([used.sum()], timeout=60)
            assert (await context.gradients())[x].tolist() == [2.0] * 4
