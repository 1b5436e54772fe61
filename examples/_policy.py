"""A network for Connect-4, and the learner that trains it on games of self-play."""

import copy
import random
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ._connect4 import BITS, HEIGHT, WIDTH

SQUARES = torch.tensor([[BITS * x + y for x in range(WIDTH)] for y in range(HEIGHT)])

Sample = tuple[int, int, list[float], float]
"""Stones of the player to move and of the other, share of each column, result of the game."""


def boards(mine: Tensor, theirs: Tensor) -> Tensor:
    """Return boards [B, 2, 6, 7] of bitboards [B]."""
    return (torch.stack((mine, theirs), 1)[:, :, None, None] >> SQUARES & 1).float()


class Network(nn.Module):
    """A network whose second layer sees windows of 4 x 4 squares: each line of four is in one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * (WIDTH - 3) * (HEIGHT - 3), 128),
            nn.ReLU(),
        )
        self.policy, self.value = nn.Linear(128, WIDTH), nn.Linear(128, 1)

    def forward(self, boards: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, 7] of the columns and values [B], from -1 to 1, for the mover."""
        features = self.body(boards.to(self.value.weight.device))
        return self.policy(features), self.value(features).squeeze(1).tanh()


class Learner:
    """A network that learns from the latest games.

    Args:
        seed: Seed of its weights.
        reuse: Number of times that a position is learnt from, on average.
        memory: Number of positions that are kept.
        batch: Number of positions of a step; their mirror images are added.
        device: Device of the network.
    """

    def __init__(
        self,
        seed: int,
        *,
        reuse: int = 8,
        memory: int = 150_000,
        batch: int = 512,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(seed)
        self.network = Network().to(device)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=2e-3, weight_decay=1e-3)
        self.samples: deque[Sample] = deque(maxlen=memory)
        self.reuse, self.batch = reuse, batch
        self.loss = 0.0

    def learn(self, games: Sequence[Sequence[Sample]]) -> Network:
        """Learn from new games and some older ones; return a copy of the network."""
        fresh = [sample for game in games for sample in game]
        self.samples.extend(fresh)
        for _ in range(max(1, self.reuse * len(fresh) // self.batch)):
            self._step(random.choices(self.samples, k=self.batch))
        return self.copy()

    def _step(self, samples: Sequence[Sample]) -> None:
        mine, theirs, shares, results = map(torch.tensor, zip(*samples, strict=True))
        seen = boards(mine, theirs)
        logits, values = self.network(torch.cat((seen, seen.flip(3))))
        shares, results = shares.to(logits.device), results.to(logits.device)
        policy = functional.cross_entropy(logits, torch.cat((shares, shares.flip(1))))
        loss = policy + functional.mse_loss(values, results.repeat(2))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.loss += 0.02 * (loss.item() - self.loss)

    def copy(self) -> Network:
        """Return a copy of the network as it is now."""
        return copy.deepcopy(self.network)
