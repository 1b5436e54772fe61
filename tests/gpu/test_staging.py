"""Small tensors on a device, which travel through the host if they are ready."""

import asyncio
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiorpc_torch import RRef, call, remote, supervised
from tests.support.cuda_actors import (
    GPU,
    HERE,
    LONG,
    SIZE,
    Actor,
    fails_without,
    gpu_world,
    late,
    on_a_loop,
    settle,
    sleep,
    warm_actor,
)

pytestmark = GPU

SMALL = 256


async def ready_actor(worker: str = "a") -> tuple[Any, RRef[Actor]]:
    """An actor that has nothing to do, nor has its device."""
    actor, rref = await warm_actor(worker)
    await actor.settle()
    settle()
    return actor, rref


# ── ways ────────────────────────────────────────────────────────────────────────────────────────


# ── order ───────────────────────────────────────────────────────────────────────────────────────


@fails_without("host")
@pytest.mark.parametrize("method", ["make", "amake"])
@on_a_loop
async def test_small_results_that_are_still_computed(method: str) -> None:
    async with gpu_world(["a"]):
        actor, _ = await ready_actor()
        for value in (11.0, 12.0, 13.0):
            found = await getattr(actor, method)(value, SMALL)
            assert found.device == HERE
            assert float(found.double().sum()) == value * SMALL


@fails_without("host")
@pytest.mark.parametrize("method", ["total", "atotal"])
@on_a_loop
async def test_small_arguments_that_are_still_computed(method: str) -> None:
    """Alone, and as many at once."""
    async with gpu_world(["a"]):
        actor, _ = await ready_actor()
        assert float(await getattr(actor, method)(late(14.0, SMALL))) == 14.0 * SMALL
        tensors = [late(float(n), SMALL) for n in range(15, 19)]
        found = await asyncio.gather(*(getattr(actor, method)(each) for each in tensors))
        assert [float(each) for each in found] == [n * SMALL for n in range(15, 19)]


@on_a_loop
async def test_behind_work_of_the_receiver() -> None:
    """What arrives is behind it on the stream, and no event loop waits for that."""
    async with gpu_world(["a"]):
        actor, _ = await ready_actor()
        x = torch.ones(SMALL, device=HERE)
        await actor.note(x * 0)  # whatever the first call makes
        assert await actor.noted() == [0.0]
        settle()
        start = time.monotonic()
        await actor.be_busy()  # for a second
        for value in range(20):
            await actor.note(x * value)
            settle()
        assert time.monotonic() - start < 0.7 or HERE.type == "cpu"
        assert await actor.noted() == [float(value * SMALL) for value in range(20)]
        given = x * 3
        settle()
        returning = asyncio.ensure_future(actor.give_back(given))
        await asyncio.sleep(0)
        sleep(LONG)  # the result comes while this worker's stream is busy
        found = await returning
        assert (found + 1).tolist() == [4.0] * SMALL


@on_a_loop
async def test_an_object_keeps_its_order() -> None:
    """Small and large tensors, by both ways, in calls of one object."""
    async with gpu_world(["a"]):
        actor, _ = await ready_actor()
        for n in range(8):
            await actor.aadd(torch.full((SIZE if n % 2 else 1,), 1.0, device=HERE))
            await actor.add(late(1.0, 1))
        assert float((await actor.state()).double().sum()) == 16.0 * SIZE


# ── values ──────────────────────────────────────────────────────────────────────────────────────


def forms() -> dict[str, Any]:
    whole = torch.arange(24.0, device=HERE).view(4, 6)
    found: dict[str, Any] = {
        "transposed": whole.T,
        "part": whole[:, 2:4],
        "row": whole[1],
        "channels last": whole.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "scalar": whole.sum(),
        "expanded": torch.ones(1, device=HERE).expand(3, 5),
        "empty": whole[:0],
        "leaf": torch.ones(3, device=HERE, requires_grad=True),
        "result": torch.ones(3, device=HERE, requires_grad=True) * 2,
        "parameter": nn.Parameter(torch.ones(3, device=HERE)),
        "together": {"x": [whole, torch.ones(2)], "y": (torch.ones(3, device=HERE), 4)},
        "beside a large one": [torch.ones(3, device=HERE), torch.ones(SIZE, device=HERE)],
        "beside a large one on the CPU": [torch.ones(3, device=HERE), torch.ones(SIZE)],
        "views of one": [whole, whole.T, whole],
        "many": [torch.full((2,), float(n), device=HERE) for n in range(40)],
    }
    kinds = torch.half, torch.bfloat16, torch.bool, torch.complex64, torch.uint8, torch.long
    found |= {str(kind): whole.to(kind) for kind in kinds}
    if HERE.type == "cuda":
        found["beside pinned"] = [torch.ones(3, device=HERE), torch.ones(3).pin_memory()]
    return found


def described(value: Any) -> Any:
    """What must be equal of a value that was received in whatever way."""
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    strides = value.stride() if value.numel() else ()
    kind = type(value), value.dtype, value.device, tuple(value.shape), strides
    return *kind, value.requires_grad, value.is_leaf, value.detach().cpu().tolist()


@on_a_loop
async def test_what_arrives_is_the_same_by_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """As arguments: their way alone is chosen here."""
    async with gpu_world(["a"]):
        actor, _ = await ready_actor()
        for name, value in forms().items():
            settle()
            staged = described(await actor.give_back(value))
            with monkeypatch.context() as patches:
                patches.setattr("aiorpc_torch._torch.staging.STAGED_BYTES", -1)
                by_torch = described(await actor.give_back(value))
            assert staged == by_torch, name


@on_a_loop
async def test_tensors_of_one_storage_share_memory_there() -> None:
    async with gpu_world(["a"]):
        actor, _ = await ready_actor()
        x = torch.zeros(2, 3, device=HERE)
        settle()
        one, other, third = await actor.give_back([x, x.T, x])
        assert one is third
        other.fill_(1)
        if HERE.type == "cuda":
            assert one.tolist() == [[1.0] * 3] * 2


# ── kinds of calls ──────────────────────────────────────────────────────────────────────────────


@on_a_loop
async def test_kinds_of_calls() -> None:
    """Groups, batches, streams, supervised and retried calls, and those of an own object."""
    async with gpu_world(["a", "b"], max_restarts=1):
        (a, _), _ = await ready_actor("a"), await ready_actor("b")
        x = torch.arange(3.0, device=HERE)
        settle()
        await a.settle()
        for found in await call(["a", "b", "main"], torch.add, x, x):
            assert (found.device, found.tolist()) == (HERE, [0.0, 2.0, 4.0])
        found = await asyncio.gather(*(a.each_plus_one(x + n) for n in range(6)))
        assert [each.tolist() for each in found] == [(x + n + 1).tolist() for n in range(6)]
        assert [item.tolist() async for item in a.small_items(4)] == [[n] * 3 for n in range(4)]
        own: Any = remote(RRef(Actor()))
        assert (await own.give_back_twice(x))[1].tolist() == [1.0, 2.0, 3.0]
        again: Any = remote(await supervised("b", Actor), retries=1)
        assert (await again.give_back_twice(x))[1].tolist() == [1.0, 2.0, 3.0]
