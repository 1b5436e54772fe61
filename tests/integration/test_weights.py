"""Versioned weights in processes: one transfer a host, whole versions, publishers that are lost."""

import asyncio
from typing import Any

import pytest
import torch
from torch import multiprocessing

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, WorkerLost, create, remote
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import kill, world
from aiorpc_torch.training import follow
from tests.support.followers import Actor, Learner, Net, answer_values
from tests.support.supervised_objects import lose

LONG = 60.0
LARGE = 256  # a model of 1 MiB, which a thread copies


async def start_all(actors: "Group[Actor]", **options: Any) -> None:
    await remote(actors).start(**options)


@pytest.mark.promise("training.whole", "training.follow", "training.once")
async def test_actors_see_whole_versions() -> None:
    """In every batch, in threads and on the loop, while versions arrive as fast as they can."""
    async with world(["learner", "a", "b"]), asyncio.timeout(LONG):
        learner = await create("learner", Learner, size=LARGE)
        actors = await create(["a", "b"], Actor, size=LARGE)
        await start_all(actors)
        watching = asyncio.create_task(watch(actors, 30))
        results = list[tuple[int, int]]()
        publishing = asyncio.create_task(remote(learner).publish_many(30))
        while not watching.done():
            for method in ("act", "act_on_loop"):
                calls = [getattr(remote(actor), method)(torch.ones(1)) for actor in actors]
                results += await asyncio.gather(*calls)
        assert await publishing == 30
        assert all(count == 1 for _, count in results)
        for seen in await watching:
            assert seen == sorted(set(seen))
            assert seen[-1] == 30
        assert (await aiorpc.call("learner", stats)).segments > 0
        await remote(actors).close()


async def watch(actors: "Group[Actor]", until: int) -> list[list[int]]:
    return await remote(actors).watch(until)


@pytest.mark.promise("training.lost", "training.replaced")
async def test_a_publisher_that_is_replaced() -> None:
    async with world(["learner", "a"], max_restarts=1) as me, asyncio.timeout(LONG):
        learner = await create("learner", Learner)
        actor = await create("a", Actor)
        await remote(actor).start()
        assert await remote(learner).publish_many(5) == 5
        assert await remote(actor).wait(5) == 5
        waiting = asyncio.create_task(remote(actor).wait(6))
        await lose("learner")
        assert await remote(actor).update() == 5
        assert await remote(actor).values() == {5.0}
        await me.wait_for("learner")
        assert await remote(actor).update() == 5
        learner = await create("learner", Learner, 100.0)
        assert await remote(learner).publish(101.0) in (1, 6)
        assert await waiting == 6
        assert await remote(actor).values() == {101.0}
        assert await remote(learner).publish(102.0) == 7
        assert await remote(actor).update() == 7


@pytest.mark.promise("training.lost")
async def test_a_publisher_that_is_lost_for_good() -> None:
    """Waits end, versions stay; a follower that was killed disturbs no other."""
    async with world(["learner", "a", "b"]), asyncio.timeout(LONG):
        learner = await create("learner", Learner)
        actors = await create(["a", "b"], Actor)
        await start_all(actors, patience=0.05)
        kill("b")
        assert await remote(learner).publish() == 1
        actor = actors[0]
        assert await remote(actor).wait(1) == 1
        waiting = asyncio.create_task(remote(actor).wait(2))
        kill("learner")
        with pytest.raises(WorkerLost):
            await waiting
        assert await remote(actor).update() == 1
        with pytest.raises(WorkerLost):
            await remote(actor).wait(2)
        assert await remote(actor).values() == {1.0}


@pytest.mark.promise("training.relays")
async def test_one_transfer_for_another_host() -> None:
    """By way of a relay, which may be killed, or be in the process that replaces it."""
    names = ["a", "b", "c"]
    async with world(["learner", *names]), asyncio.timeout(LONG):
        learner = await create("learner", Learner, size=LARGE)
        actors = await create(names, Actor, size=LARGE)
        assert await remote(actors[0]).start(host="other") == 0
        await start_all(actors[1:], host="other")
        assert await remote(actors).relay() == ["a"] * 3
        assert await remote(learner).publish() == 1
        assert await remote(actors).wait(1) == [1] * 3
        assert await remote(learner).sent() <= 3  # the first, the second, and the next is awaited
        kill("a")
        rest = actors[1:]
        assert await remote(learner).publish() == 2
        assert await remote(rest).wait(2) == [2] * 2
        relays = set(await remote(rest).relay())
        assert len(relays) == 1
        assert relays < {"b", "c"}
        assert await remote(rest).values() == [{2.0}] * 2
        kill("learner")
        assert await remote(rest).update() == [2] * 2
        await remote(rest).close()


@pytest.mark.promise("training.relays")
async def test_a_publisher_that_is_replaced_on_another_host() -> None:
    async with world(["learner", "a", "b"], max_restarts=1) as me, asyncio.timeout(LONG):
        learner = await create("learner", Learner)
        actors = await create(["a", "b"], Actor)
        await start_all(actors, host="other")
        assert await remote(learner).publish_many(5) == 5
        assert await remote(actors).wait(5) == [5, 5]
        waiting = asyncio.create_task(wait_all(actors, 6))
        await lose("learner")
        await me.wait_for("learner")
        learner = await create("learner", Learner)
        await remote(learner).publish(101.0)
        assert await waiting == [6, 6]
        assert await remote(actors).values() == [{101.0}] * 2
        late = await create("b", Actor)
        assert await remote(late).start(host="other") == 6
        await remote(late).close()


async def wait_all(actors: "Group[Actor]", version: int) -> list[int]:
    return await remote(actors).wait(version)


@pytest.mark.slow
@pytest.mark.promise("training.in_place")
async def test_a_process_that_shares_the_model_sees_the_versions() -> None:
    async with world(["learner"]), asyncio.timeout(LONG):
        learner = await create("learner", Learner)
        net = Net(-1).share_memory()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=answer_values, args=(net, theirs), daemon=True)
        process.start()
        async with await follow("policy", into=net) as policy:
            for version in range(3):
                assert await policy.wait(version) == version
                ours.send(True)
                assert await asyncio.to_thread(ours.recv) == {float(version)}
                await remote(learner).publish()
        ours.send(False)
        await asyncio.to_thread(process.join)
        assert process.exitcode == 0
