"""Workers that leave before their blocks end: `me.leave()`."""

import asyncio
import time
from pathlib import Path

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import WorkerLeft, call
from aiorpc_torch.testing import world
from aiorpc_torch.training import Replay, StalenessLimit, Weights, follow, recover
from aiorpc_torch.types import Worker
from tests.support.slack import SLACK
from tests.support.two_ends import until

SOON = 30.0


async def wait_for_file(path: Path) -> str:
    await until(path.exists)
    return "done"


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def drain(me: Worker, folder: Path, has_endless_call: bool) -> list[object]:
    """Rank 1 leaves while rank 0 calls it; rank 2 is there to the end."""
    if me.name == "worker2":
        await until((folder / "drained").exists)  # a worker that has left is not waited for
        await me.serve("worker0")
        return []
    if me.name == "worker1":
        await until((folder / "called").exists)
        await asyncio.gather(me.leave(), me.leave())
        assert await call("worker2", abs, -1) == 1
        await me.leave()
        (folder / "drained").touch()
        return []
    changes = me.changes()
    first = asyncio.ensure_future(anext(changes))
    served = asyncio.create_task(call("worker1", wait_for_file, folder / "go"))
    endless = [asyncio.create_task(call("worker1", wait_for_ever))] if has_endless_call else []
    await until(lambda: not aiorpc.observe.stats().unsent)
    assert await call("worker1", abs, -1) == 1  # behind them
    (folder / "called").touch()
    change = await first
    (folder / "go").touch()
    found: list[object] = [change.kind, change.name, await served]
    for running in (*endless, call("worker1", abs, -1)):
        try:
            await running
        except WorkerLeft as exc:
            found.append(exc.may_have_run)
    return [*found, me.peers, await call("worker2", abs, -2)]


@pytest.mark.promise("joining.drain")
@pytest.mark.parametrize("has_endless_call", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_worker_that_leaves_first(tmp_path: Path, has_endless_call: bool) -> None:
    """It takes no new calls; those that run end, or are cancelled after 10 s; it may call."""
    found = aiorpc.run_local(drain, 3, args=(tmp_path, has_endless_call))
    may_have_run = [True, False] if has_endless_call else [False]
    assert found == ["left", "worker1", "done", *may_have_run, ("worker2",), 2]


async def leave_and_raise(me: Worker, folder: Path) -> None:
    if me.name == "worker1":
        for peer in me.peers:
            await call(peer, wait_for_file, folder / peer)
        try:
            raise LookupError("a mistake")
        finally:
            await me.leave()
    changes = me.changes()
    (folder / me.name).touch()
    change = await anext(changes)
    (folder / me.name).write_text(f"{change.kind} {change.name}")


@pytest.mark.promise("joining.drain")
def test_a_worker_that_leaves_and_raises(tmp_path: Path) -> None:
    """It has left, for each of its peers: what it raises then is its own affair."""
    with pytest.raises(LookupError, match="a mistake"):
        aiorpc.run_local(leave_and_raise, 5, args=(tmp_path,), on_failure="continue")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["left worker1"] * 4


@pytest.mark.promise("joining.drain")
async def test_the_first_worker_of_a_local_world_leaves() -> None:
    """Its children serve it until its block ends."""
    async with asyncio.timeout(SOON), world(["a"]) as me:
        await me.leave()
        assert await call("a", abs, -1) == 1


async def hand_over(me: Worker) -> object:
    """Rank 1 publishes and leaves; rank 2 goes on with what rank 0 has followed meanwhile."""
    if me.name == "worker1":
        aiorpc.register("replay", Replay())
        aiorpc.register("policy", Weights({"x": torch.ones(1)}, version=1))
        waits = {"Weights.after", "Replay.sample", "watch_name"}
        await until(lambda: waits <= {each.method for each in aiorpc.observe.pending()})
        begun = time.monotonic()
        await me.leave()
        assert time.monotonic() - begun < SLACK  # calls that run would get 10 s
        return None
    if me.name == "worker2":
        await anext(me.changes())
        found = await recover("policy")
        assert found is not None
        weights = Weights(found.tree, version=found.version)
        aiorpc.register("policy", weights)
        return await weights.publish({"x": torch.full((1,), 2.0)})
    policy = await follow("policy")
    replay = aiorpc.remote(await aiorpc.lookup("replay"))
    refused = asyncio.gather(
        replay.sample(1), aiorpc.lookup("nothing", on="worker1"), return_exceptions=True
    )
    version = await policy.wait(2)
    return [version, policy.state["x"].tolist(), [type(each).__name__ for each in await refused]]


@pytest.mark.promise("training.handed_over")
def test_a_publisher_that_leaves() -> None:
    """Who waits for it does not hold it up; followers keep its version, and go on with the next."""
    assert aiorpc.run_local(hand_over, 3) == [2, [2.0], ["WorkerLeft", "WorkerLeft"]]


async def hold_a_ticket(me: Worker) -> object:
    """Rank 1 has a limit and leaves, while one of two rollouts runs and the other one waits."""
    if me.name == "worker1":
        limit = StalenessLimit(2, max_in_flight=1)
        aiorpc.register("limit", limit)
        await aiorpc.lookup("begun")
        await until(lambda: "1 waiting" in repr(limit))
        await me.leave()
        return None
    limit = aiorpc.proxy(await aiorpc.lookup("limit"))
    async with limit.ticket():
        second = asyncio.create_task(enter(limit))
        aiorpc.register("begun", second)
        return await second


async def enter(limit: StalenessLimit) -> str:
    try:
        async with limit.ticket():
            return "a ticket"
    except WorkerLeft as exc:
        return str(exc.method)


@pytest.mark.promise("training.handed_over", "training.tickets")
@pytest.mark.slow
def test_a_limit_that_leaves() -> None:
    """A rollout that runs ends in order; one that waits for a ticket ends at once."""
    assert aiorpc.run_local(hold_a_ticket, 2) == "StalenessLimit.ticket"
