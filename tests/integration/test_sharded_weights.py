"""Versions of several publishers, whose tensors may be DTensors, in processes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    zeros,
)

import aiorpc_torch as aiorpc
from aiorpc_torch import call
from aiorpc_torch.testing import kill, world
from aiorpc_torch.training import Follower, recover
from tests.support.followers import Counting
from tests.support.supervised_objects import lose

LONG = 60.0
TRAINERS = ["t0", "t1"]
ACTORS = ["a", "b"]
SHAPE = (600, 130)  # 300 KiB; no process has as many rows as another one of three
PLACEMENTS = [
    pytest.param(Shard(0), id="rows"),
    pytest.param(Shard(1), id="columns", marks=pytest.mark.slow),
    pytest.param(Replicate(), id="replicas", marks=pytest.mark.slow),
]
HEAD = (1, 64)  # of two shards of its rows one is empty
kept: dict[str, Any] = {}


def value(version: int) -> Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + version


async def enter_group(file: Path, rank: int) -> None:
    """Enter a process group of two, with a mesh."""
    store = dist.FileStore(str(file), 2)
    await asyncio.to_thread(dist.init_process_group, "gloo", store=store, rank=rank, world_size=2)
    kept["mesh"] = await asyncio.to_thread(init_device_mesh, "cpu", (2,))


async def leave_group() -> None:
    dist.destroy_process_group()


def tree(version: int, placements: list[Placement]) -> dict[str, Any]:
    """Return a version: a DTensor, a tensor that all have, one of this worker's own, a number."""
    me = aiorpc.RRef(kept).owner_name()
    mesh = kept.get("mesh")
    whole = value(version)
    sharded = distribute_tensor(whole, mesh, placements) if mesh else whole
    own = {f"only on {me}": torch.full((3,), float(version))}
    return {"w": sharded, "all": torch.tensor([version]), "own": own, "number": version}


async def publish(version: int, placements: list[Placement]) -> int:
    if "weights" not in kept:
        kept["weights"] = Counting(tree(version, placements), version=version)
        aiorpc.register("policy", kept["weights"])
        return version
    return int(await kept["weights"].publish(tree(version, placements)))


async def sent() -> int:
    """Return the bytes of tensors that were sent since the last call."""
    answers: list[int] = kept["weights"].sent
    found = sum(answers)
    answers.clear()
    return found


async def start_following(host: str | None, placements: list[Placement] | None) -> int:
    """Follow both trainers, with a DTensor or without."""
    into: Any = None
    if placements is not None:
        empty = zeros(SHAPE, device_mesh=kept["mesh"], placements=placements)  # asks no other rank
        head = zeros(HEAD, device_mesh=kept["mesh"], placements=placements)
        kept["into"] = into = {"w": empty, "head": head}
    kept["follower"] = follower = Follower("policy", TRAINERS, into, host=host)
    await follower._begin()
    return follower.version


async def follow_until(version: int) -> tuple[int, dict[str, Any]]:
    follower: Follower = kept["follower"]
    found = await follower.wait(version)
    return found, follower.state


async def local() -> Tensor:
    """Return the shard of this worker's DTensor, once version 6 is in."""
    head: DTensor = kept["into"]["head"]
    assert head.to_local().eq(6.0).all()
    found: DTensor = kept["into"]["w"]
    return found.to_local()


def check(found: tuple[int, dict[str, Any]], version: int) -> None:
    number, state = found
    assert (number, state["number"], state["all"].item()) == (version,) * 3
    assert torch.equal(state["w"], value(version))
    for each in TRAINERS:
        assert state["own"][f"only on {each}"].tolist() == [float(version)] * 3


async def publish_all(version: int, *placements: Placement) -> None:
    given = [*placements]
    found = await asyncio.gather(*(call(each, publish, version, given) for each in TRAINERS))
    assert found == [version] * 2


@pytest.mark.promise("training.shards")
@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_shards_of_two_publishers(tmp_path: Path, placement: Placement) -> None:
    """Two followers of another host get whole tensors; each byte travels there once."""
    async with world([*TRAINERS, *ACTORS]), asyncio.timeout(LONG):
        await asyncio.gather(
            *(call(each, enter_group, tmp_path / "t", rank) for rank, each in enumerate(TRAINERS))
        )
        await publish_all(5, placement)
        for each in ACTORS:
            assert await call(each, start_following, "other", None) == 5
        counts = [await call(each, sent) for each in TRAINERS]
        assert sum(counts) <= 1.1 * value(0).nbytes
        await publish_all(6, placement)
        for each in ACTORS:
            check(await call(each, follow_until, 6), 6)
        assert 0.9 * value(0).nbytes <= sum([await call(each, sent) for each in TRAINERS])
        other = Shard(1) if placement == Shard(0) else Shard(0)
        await publish_all(7, other)  # what each publisher sends is planned anew
        for each in ACTORS:
            check(await call(each, follow_until, 7), 7)
        late = await aiorpc.training.follow("policy", on=TRAINERS)
        check((late.version, late.state), 7)
        await late.aclose()
        await asyncio.gather(*(call(each, leave_group) for each in TRAINERS))


@pytest.mark.promise("training.shards")
@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_slices_of_followers(tmp_path: Path, placement: Placement) -> None:
    """The followers have a mesh of their own, each on a host of its own."""
    async with world([*TRAINERS, *ACTORS]), asyncio.timeout(LONG):
        for names in (TRAINERS, ACTORS):
            file = tmp_path / names[0]
            await asyncio.gather(
                *(call(each, enter_group, file, rank) for rank, each in enumerate(names))
            )
        await asyncio.gather(*(call(each, publish_only, 5) for each in TRAINERS))
        for each in ACTORS:
            assert await call(each, start_following, f"host of {each}", [placement]) == 5
        await asyncio.gather(*(call(each, publish_only, 6) for each in TRAINERS))
        for rank, each in enumerate(ACTORS):
            await call(each, follow_until, 6)
            found, whole = await call(each, local), value(6)
            dim = getattr(placement, "dim", None)
            assert torch.equal(found, whole if dim is None else whole.chunk(2, dim)[rank])
        total = sum([await call(each, sent) for each in TRAINERS])
        share = 2 if placement.is_replicate() else 1  # for each host, and version
        assert total <= 1.1 * 2 * share * value(0).nbytes
        await asyncio.gather(*(call(each, leave_group) for each in [*TRAINERS, *ACTORS]))


async def publish_only(version: int) -> int:
    """Publish a DTensor alone."""
    tensors = {"w": value(version), "head": torch.full(HEAD, float(version))}
    mesh = kept["mesh"]
    given = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in tensors.items()}
    if "weights" not in kept:
        kept["weights"] = Counting(given, version=version)
        aiorpc.register("policy", kept["weights"])
        return version
    return int(await kept["weights"].publish(given))


@pytest.mark.promise("training.shards", "training.recover")
async def test_a_publisher_that_is_ahead_and_one_that_dies() -> None:
    """A version is complete when all have it; the replacement process goes on with the last."""
    async with world([*TRAINERS, *ACTORS], max_restarts=1) as me, asyncio.timeout(LONG):
        await publish_all(5, Shard(0))
        assert await call("a", start_following, None, None) == 5
        waiting = asyncio.ensure_future(call("a", follow_until, 6))
        assert await call("t0", publish, 6, []) == 6
        assert await call("b", start_following, None, None) == 5
        await lose("t1")
        await me.wait_for("t1")
        found = await recover("policy")
        assert found is not None
        check((found.version, found.tree), 5)
        assert not waiting.done()
        assert await call("t1", publish, 5, []) == 5
        assert await call("t1", publish, 6, []) == 6
        check(await waiting, 6)
        check(await call("b", follow_until, 6), 6)
        for number in (7, 8, 9):  # one that is far behind: its versions are no longer kept there
            await call("t0", publish, number, [])
        waiting = asyncio.ensure_future(call("a", follow_until, 7))
        for number in (7, 8, 9):
            await call("t1", publish, number, [])
        number, _ = await waiting
        assert number in (8, 9)
        kill("t1")
        check(await call("a", follow_until, 9), 9) if number == 9 else None


async def test_publishers_that_are_named_wrongly() -> None:
    async with world(TRAINERS), asyncio.timeout(LONG):
        for on in ([], ["t0", "t0"]):
            with pytest.raises(ValueError, match="on must name one worker or several different"):
                await aiorpc.training.follow("policy", on=on)
        with pytest.raises(TypeError, match="a list or tuple of workers"):
            await aiorpc.training.follow("policy", on={"t0"})  # type: ignore[arg-type]
