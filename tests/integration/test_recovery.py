"""Learners that come back: their weights are in the memory of those who follow them."""

import asyncio
import logging
import os
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import call
from aiorpc_torch.testing import kill, world
from aiorpc_torch.training import Follower, Recovered, Weights, follow, recover, recovery
from tests.support.supervised_objects import lose

LONG = 60.0
kept: dict[str, Any] = {}


async def learn(versions: int, start: float = 0.0) -> int:
    """Publish so many versions, each of tensors with its number; go on from what followers hold."""
    if "weights" not in kept:
        found = await recover("policy")
        number = 0 if found is None else found.version
        assert found is None or found.tree["x"].tolist() == [float(number)] * 4
        kept["weights"] = weights = Weights({"x": torch.full((4,), float(number))}, version=number)
        aiorpc.register("policy", weights)
    for _ in range(versions):
        number = kept["weights"].version + 1
        assert await kept["weights"].publish({"x": torch.full((4,), float(number))}) == number
    return int(kept["weights"].version)


async def start_following(into: bool) -> int:
    """Follow, with a dict of tensors that gets each version or without."""
    kept["x"] = {"x": torch.zeros(4)}
    kept["follower"] = await follow("policy", into=kept["x"] if into else None)
    return int(kept["follower"].version)


async def follow_until(version: int) -> tuple[int, list[float]]:
    follower: Follower = kept["follower"]
    found = await follower.wait(version)
    return found, follower.state["x"].tolist()


async def die_as_it_answers(self: Any) -> None:
    """In the place of `take`, on a worker that will be lost."""
    os._exit(1)


async def die_at_the_next_question() -> None:
    recovery.Copies.take = die_as_it_answers  # type: ignore[assignment, method-assign]


@pytest.mark.promise("training.recover")
async def test_a_learner_that_comes_back() -> None:
    """Twice; followers with and without `into` hold its weights, and follow the next one."""
    async with world(["learner", "a", "b"], max_restarts=2) as me, asyncio.timeout(LONG):
        assert await call("learner", learn, 3) == 3
        assert await call("a", start_following, into=True) == 3
        assert await call("b", start_following, into=False) == 3
        assert await call("learner", learn, 4) == 7
        for newest in (7, 10):
            assert [await call(each, follow_until, newest) for each in "ab"] == [
                (newest, [float(newest)] * 4)
            ] * 2
            await lose("learner")
            await me.wait_for("learner")
            assert await call("learner", learn, 3) == newest + 3
        assert await call("b", follow_until, 13) == (13, [13.0] * 4)


@pytest.mark.promise("training.recover")
async def test_followers_that_are_behind_or_die() -> None:
    """The newest that is left counts; with none left there is nothing."""
    async with world(["learner", "a", "b"]), asyncio.timeout(LONG):
        assert await recover("policy") is None
        await call("learner", learn, 1)
        await asyncio.gather(*(call(each, start_following, into=False) for each in "ab"))
        await call("a", stop_following)
        await call("learner", learn, 1)
        assert await call("b", follow_until, 2) == (2, [2.0] * 4)
        kill("learner")
        newest = await recover("policy")
        assert newest == Recovered(2, newest.tree if newest else None)
        await call("b", die_at_the_next_question)
        older = await recover("policy")
        assert older is not None
        assert (older.version, older.tree["x"].tolist()) == (1, [1.0] * 4)
        kill("a")
        assert await recover("policy") is None


@pytest.mark.promise("training.recover")
async def test_two_that_claim_to_be_the_learner() -> None:
    """A follower keeps to one of them; it goes on with the other, never back."""
    async with world(["one", "two"]), asyncio.timeout(LONG):
        await call("one", learn, 3)
        policy = await follow("policy")
        assert await call("two", claim) == 0
        await call("one", learn, 1)
        assert (await policy.update(), policy.state["x"].tolist()) == (4, [4.0] * 4)
        kill("one")
        assert await call("two", publish_claim) >= 1
        assert await policy.wait(5) == 5
        assert policy.state["x"].tolist() == [-1.0] * 4
        await policy.aclose()


async def claim() -> int:
    """Register weights of the same name, without `recover`."""
    kept["weights"] = Weights({"x": torch.zeros(4)})
    aiorpc.register("policy", kept["weights"])
    return int(kept["weights"].version)


async def publish_claim() -> int:
    return int(await kept["weights"].publish({"x": -torch.ones(4)}))


async def stop_following() -> None:
    """Keep the version that is there."""
    await kept["follower"].aclose()


@pytest.mark.promise("training.recover")
async def test_several_followers_of_one_worker() -> None:
    """One of them is newer than the other, and one is gone."""
    async with world(["learner"]), asyncio.timeout(LONG):
        await call("learner", learn, 1)
        async with await follow("policy") as old, await follow("policy"):
            await call("learner", learn, 1)
            await old.aclose()
            newer = await follow("policy")
            kill("learner")
            found = await recover("policy")
            assert found is not None
            assert found.version == newer.version == 2
            await newer.aclose()


@pytest.mark.promise("training.recover")
async def test_the_state_of_a_random_generator() -> None:
    """torch reads it at the start of its storage, wherever it is in a version."""
    async with world([]), asyncio.timeout(LONG):
        tree = {"x": torch.zeros(3), "rng": torch.get_rng_state(), "y": torch.zeros(5)}
        aiorpc.register("policy", Weights(tree))
        async with await follow("policy") as follower:
            expected = torch.rand(3)
            found = await recover("policy")
            assert found is not None
            for state in (found.tree["rng"], follower.state["rng"]):
                torch.set_rng_state(state)
                assert torch.rand(3).tolist() == expected.tolist()
    with pytest.raises(TypeError, match="a name must be a str"):
        await recover(3)  # type: ignore[arg-type]
    assert await beginning_anew() == 1


async def beginning_anew() -> int:
    """A learner that comes back without `recover`: the log says what to write."""
    caught: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: caught.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("aiorpc_torch")
    log.addHandler(handler)
    try:
        weights = Weights({"x": torch.zeros(3)})
        assert await weights.kept(5) == (0, 0)
        assert await weights.kept(6) == (0, 0)
    finally:
        log.removeHandler(handler)
    return len([each for each in caught if "await recover(name)" in each])
