"""A synthetic task and a model that can be cut, for the programs that train in a pipeline.

It has no code for workers. Each layer is made from a seed of its own and draws its dropout from a
generator of its own, so that the model is the same however it is cut.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 8
SIDE = 24  # pixels
NOISE = 1.2  # standard deviation of a pixel; waves are between -1 and 1


# ── the task ────────────────────────────────────────────────────────────────────────────────────


class Textures(NamedTuple):
    """Images of waves in noise, with the direction as label: one of eight."""

    images: Tensor  # [N, 1, 24, 24] float32
    labels: Tensor  # [N] int64


def textures(count: int, generator: torch.Generator) -> Textures:
    """Make `count` images with their labels."""

    def drawn(low: float, high: float) -> Tensor:
        return torch.empty(count, 1, 1, 1).uniform_(low, high, generator=generator)

    labels = torch.randint(CLASSES, (count,), generator=generator)
    angles = labels.view(-1, 1, 1, 1) * (math.pi / CLASSES) + drawn(-0.1, 0.1)
    x, y = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    along = x * angles.cos() + y * angles.sin()
    waves = torch.sin(along * drawn(0.6, 1.4) + drawn(0.0, 2 * math.pi))
    return Textures(waves + NOISE * torch.randn(waves.shape, generator=generator), labels)


def batches(steps: int, size: int, seed: int) -> Iterator[Textures]:
    """Yield the training batches of a run."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield textures(size, generator)


def held_out(count: int, seed: int) -> Textures:
    """Return images that training does not see."""
    return textures(count, torch.Generator().manual_seed(seed + 1_000_003))


# ── the model ───────────────────────────────────────────────────────────────────────────────────


class Dropout(nn.Module):
    """A dropout of whole channels, with a generator of its own."""

    def __init__(self, part: float, seed: int) -> None:
        super().__init__()
        self.part = part
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = torch.empty(*x.shape[:2], 1, 1).bernoulli_(1 - self.part, generator=self.generator)
        return x * keep.to(x.device) / (1 - self.part)  # the generator is on the CPU


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            *convolution(width, width, 1), nn.ReLU(), *convolution(width, width, 1)
        )
        self.dropout = Dropout(0.1, seed)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.dropout(self.change(x))
        return functional.relu(x + changed)


def convolution(inside: int, outside: int, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outside),
    ]


class Shape(NamedTuple):
    """The size of the model, its seed and its device."""

    blocks: int = 6
    width: int = 16  # channels
    seed: int = 0
    device: str = "cpu"


def cut(shape: Shape, stage: int = 0, stages: int = 1) -> nn.Sequential:
    """Return the layers of one stage. The stages' numbers of blocks differ by at most one."""
    parts = torch.arange(shape.blocks).tensor_split(stages)
    layers = [_made(shape, 2 + block) for block in parts[stage].tolist()]
    first = [_made(shape, 0)] if stage == 0 else []
    last = [_made(shape, 1)] if stage == stages - 1 else []
    return nn.Sequential(*first, *layers, *last).to(shape.device)


def _made(shape: Shape, number: int) -> nn.Module:
    seed = 1000 * shape.seed + number
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if number == 0:
            return nn.Sequential(*convolution(1, shape.width, 2), nn.ReLU())
        if number == 1:
            pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
            return nn.Sequential(*pooled, nn.Linear(shape.width, CLASSES))
        return Block(shape.width, seed)


def microbatches(batch: Textures, micro: int) -> list[Sequence[Any]]:
    """Cut the batch into `micro` parts, each (images, labels)."""
    return [*zip(*(column.tensor_split(micro) for column in batch), strict=True)]
