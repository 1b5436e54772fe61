"""CartPole and REINFORCE: an environment with its random numbers, a policy, a learning step.

The programs and their plain forms share it. It has no code for processes, calls or batches.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Self

import gymnasium
import torch
from torch import Tensor, nn


class Episode(NamedTuple):
    """An episode of one environment, from reset to end."""

    states: Tensor  # [T, 4] float32
    actions: Tensor  # [T] int64
    rewards: Tensor  # [T] float32

    @classmethod
    def of(cls, states: Sequence[Tensor], actions: list[int], rewards: list[float]) -> Self:
        return cls(torch.stack([*states]), torch.tensor(actions), torch.tensor(rewards))


class CartPole:
    """An environment and its random number generator, both from one seed."""

    def __init__(self, seed: int) -> None:
        self.environment: Any = gymnasium.make("CartPole-v1", disable_env_checker=True)
        self.environment.reset(seed=seed)
        self.chance = random.Random(seed)

    def reset(self) -> Tensor:
        """Start an episode; return its first state [4]."""
        return torch.from_numpy(self.environment.reset()[0])

    def draw(self, chance: float) -> int:
        """Return 1 with that probability, else 0."""
        return int(self.chance.random() < chance)

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        """Take a step; return the next state [4], the reward, and True if the episode is over."""
        state, reward, terminated, truncated, _ = self.environment.step(action)
        return torch.from_numpy(state), float(reward), terminated or truncated

    def close(self) -> None:
        """Release what the environment holds."""
        self.environment.close()


class Learner:
    """A policy that learns from episodes."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        self.device = device
        self.policy = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2)).to(device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)

    @torch.inference_mode()
    def chances(self, states: Tensor) -> list[float]:
        """Return the probability of a push to the right in each state [B, 4]."""
        chances: Tensor = self.policy(states.to(self.device)).softmax(1)[:, 1]
        return chances.tolist()  # one copy from the device

    def learn(self, episodes: Sequence[Episode]) -> None:
        """Make one step of REINFORCE; each action is weighed with its own return."""
        weights = torch.cat([returns(episode.rewards) for episode in episodes])
        weights = (weights - weights.mean()) / (weights.std(correction=0) + 1e-6)
        actions = torch.cat([episode.actions for episode in episodes])
        logits = self.policy(torch.cat([each.states for each in episodes]).to(self.device)).cpu()
        loss = (nn.functional.cross_entropy(logits, actions, reduction="none") * weights).mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def returns(rewards: Tensor, gamma: float = 0.99) -> Tensor:
    """Compute the return at each step [T] of one episode: G_t = r_t + gamma * G_{t+1}."""
    found = accumulate(reversed(rewards.tolist()), lambda later, reward: reward + gamma * later)
    return torch.tensor([*found][::-1], dtype=rewards.dtype)
