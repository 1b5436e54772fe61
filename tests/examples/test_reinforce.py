"""REINFORCE: returns, the program as a user runs it, and its plain form, which learns the same."""

import re

import pytest

pytest.importorskip("gymnasium")

import torch
from hypothesis import given, strategies as st

from examples._learning import CartPole, Episode, Learner, returns
from tests.support.example_programs import run

rewards = st.lists(st.floats(-10.0, 10.0), min_size=1, max_size=30)


@given(rewards, st.floats(0.0, 1.0))
def test_returns_are_discounted_sums(rewards: list[float], gamma: float) -> None:
    """Each step's is the sum of what comes from there on, by the formula itself."""
    naive = [
        sum(gamma ** (later - now) * rewards[later] for later in range(now, len(rewards)))
        for now in range(len(rewards))
    ]
    found = returns(torch.tensor(rewards, dtype=torch.float64), gamma)
    torch.testing.assert_close(found, torch.tensor(naive, dtype=torch.float64))


def episode(length: int, state: float = 0.1) -> Episode:
    return Episode(torch.full((length, 4), state), torch.ones(length).long(), torch.ones(length))


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6))
def test_returns_of_an_episode_are_its_own(lengths: list[int]) -> None:
    """The weights in the loss: every episode starts from nothing, whoever played before it."""
    learner = Weighing(0)
    learner.learn([episode(length) for length in lengths])
    alone = torch.cat([returns(torch.ones(length)) for length in lengths])
    expected = (alone - alone.mean()) / (alone.std(correction=0) + 1e-6)
    torch.testing.assert_close(learner.weights, expected)


class Weighing(Learner):
    """Finds the weights of the loss by its gradient with respect to each log-probability.

    The policy is a table of logits, one row for each state, so that no two steps share a parameter.
    """

    weights: torch.Tensor

    def learn(self, episodes: list[Episode]) -> None:  # type: ignore[override]
        steps = sum(len(each.actions) for each in episodes)
        logits = torch.zeros(steps, 2, requires_grad=True)
        self.policy = lambda states: logits  # type: ignore[assignment]
        self.optimizer = torch.optim.SGD([logits], lr=0.0)
        super().learn(episodes)
        assert logits.grad is not None
        # d loss / d logit of the action taken: (p - 1) / steps * weight, with p = 1/2.
        self.weights = logits.grad[:, 1] * -2.0 * steps


def test_a_likely_action_is_drawn_more_often() -> None:
    environment = CartPole(0)
    drawn = [environment.draw(0.9) for _ in range(1_000)]
    assert 850 < sum(drawn) < 950
    assert {environment.draw(0.0) for _ in range(100)} == {0}
    assert {environment.draw(1.0) for _ in range(100)} == {1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_policy_on_a_gpu() -> None:
    """Answers are numbers here, and a step changes what is there."""
    learner = Learner(0, "cuda:0")
    before = learner.chances(torch.zeros(3, 4) + 0.1)
    learner.learn([episode(5), episode(9, 0.2)])
    assert learner.chances(torch.zeros(3, 4) + 0.1) != before


def learned(lines: list[str]) -> list[str]:
    """What does not depend on how fast it was."""
    kept = [line for line in lines if re.match("(not )?solved|greedy", line)]
    return [re.sub(r", \d+ s \(.*", "", line) for line in kept]


QUICK = ("--quick", "--seed", "3")


@pytest.fixture(scope="module")
def ours() -> list[str]:
    """What the program prints, quick."""
    return run("reinforce", *QUICK).splitlines()


@pytest.mark.slow
def test_as_one_command(ours: list[str]) -> None:
    """It says what it has learned after each round, and what its greedy policy reaches."""
    assert len(learned(ours)) == 2
    assert "after 10 episodes" in learned(ours)[0]
    rounds = [line for line in ours if re.match(r"\d+ episodes: \d+, running reward [\d.]+", line)]
    assert len(rounds) == 5


@pytest.mark.slow
def test_both_forms_learn_the_same(ours: list[str]) -> None:
    """The program and its plain form, quick: the same episodes, running reward and policy."""
    plain = run("_reference.reinforce", *QUICK, python=()).splitlines()  # torch's own start warns
    assert learned(ours) == learned(plain)
