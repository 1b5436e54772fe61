"""IMPALA: V-trace against its definition, rollouts of both forms, and the whole program."""

import re
from typing import Any

import pytest

pytest.importorskip("gymnasium")

import torch
from torch import Tensor

from aiorpc_torch import register
from aiorpc_torch.testing import world
from aiorpc_torch.training import Weights
from examples.impala import (
    STEPS,
    Learner,
    Network,
    Player,
    Queue,
    at_any_time,
    in_turns,
    parse,
    start_actors,
    vtrace,
)
from tests.support.example_programs import run


def defined(ratios: Tensor, discounts: Tensor, rewards: Tensor, values: Tensor) -> Tensor:
    """Return the targets of one environment as equation 1 of the paper says, as a sum."""
    clipped, targets = ratios.clamp(max=1.0), values[:-1].clone()
    for s in range(len(rewards)):
        weight = torch.tensor(1.0)
        for t in range(s, len(rewards)):
            delta = clipped[t] * (rewards[t] + discounts[t] * values[t + 1] - values[t])
            targets[s] += weight * delta
            weight = weight * discounts[t] * clipped[t]
    return targets


def test_vtrace_is_as_it_is_defined() -> None:
    torch.manual_seed(0)
    ratios, rewards = 2 * torch.rand(7, 3, dtype=torch.double), torch.randn(7, 3).double()
    discounts = 0.9 * (torch.rand(7, 3) > 0.2).double()
    values = torch.randn(8, 3).double()
    targets, _ = vtrace(ratios, discounts, rewards, values)
    for one in range(3):
        columns = (each[:, one] for each in (ratios, discounts, rewards, values))
        torch.testing.assert_close(targets[:, one], defined(*columns))


def test_vtrace_of_the_policy_itself_is_the_return() -> None:
    ones = torch.ones(3, 1)
    targets, advantages = vtrace(ones, 0.5 * ones, ones, torch.tensor([[0.0], [0], [0], [8]]))
    assert targets.flatten().tolist() == [2.75, 3.5, 5.0]
    assert advantages.flatten().tolist() == [2.75, 3.5, 5.0]


def test_a_rollout_leaves_the_queue_once() -> None:
    queue = Queue()
    queue.extend([1, 2, 3])  # of any kind
    assert queue.sample(2) == [1, 2]
    assert [*queue] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["shared", "own"])
async def test_rollouts_of_both_forms(policy: str) -> None:
    """Each has the steps of one environment, and the version that was asked for."""
    given = parse("--actors", "1", "--environments", "3", "--policy", policy)
    async with world(["actor0", "player"], name="learner", max_restarts=1):
        learner = Learner(1)
        weights = Weights(learner.network.state_dict())
        register("policy", weights)
        actors = await start_actors(["actor0"], given)
        for form in (in_turns, at_any_time):
            version = await weights.publish(Network().state_dict())
            async with form(actors, given) as source:
                check(rollouts := await source(version), version)
        learner.learn(rollouts)


def check(rollouts: Any, version: int) -> None:
    assert len(rollouts) == 3
    for rollout in rollouts:
        assert rollout.version == version
        assert rollout.states.shape == (STEPS + 1, 4)
        assert {tuple(each.shape) for each in rollout[1:5]} == {(STEPS,)}
        assert (rollout.chances <= 0).all()


async def test_a_batch_names_its_version() -> None:
    async with world(0, name="learner"):
        register("policy", weights := Weights(Network().state_dict()))
        player = await Player.start()
        before = await player.act(torch.zeros(4))
        await player.wait(await weights.publish(Network().state_dict()))
        after = await player.act(torch.zeros(4))
        assert [before[2], after[2]] == [0, 1]
        await player.policy.aclose()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--kill", "2"),
        pytest.param(
            ("--policy", "own", "--synchronous", "--kill", "1"), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_it_learns(options: tuple[str, ...]) -> None:
    """Actors that are killed are replaced; reward doubles, and is more than at random."""
    lines = run("impala", *options, "--steps", "60000").splitlines()
    results = [int(found[1]) for line in lines if (found := re.search(r"reward (\d+);", line))]
    assert len(results) == 10
    assert max(results[-3:]) > 50
    assert sum("an actor is killed" in line for line in lines) == int(options[-1])
    assert re.fullmatch(r"mean reward of the last 50 episodes: \d+", lines[-1])
