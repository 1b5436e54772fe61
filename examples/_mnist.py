"""What every way to train on MNIST shares: the network, its snapshots, the data and their shards.

Knows no worker and no call: `_reference/mnist.py` trains the same network on the same images.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import digits

M = TypeVar("M", bound=nn.Module)


class Net(nn.Module):
    """Two convolutions, dropout, two linear layers; its second half may be on another device."""

    def __init__(self, first: str = "cpu", second: str = "cpu") -> None:
        super().__init__()
        self.first, self.second = first, second
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.25),
            nn.Flatten(),
        ).to(first)
        self.classes = nn.Sequential(
            nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
        ).to(second)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probabilities [B, 10] of images [B, 1, 28, 28], both on the CPU."""
        features = self.features(images.to(self.first)).to(self.second)
        return functional.log_softmax(self.classes(features), dim=1).cpu()


def devices(gpus: int) -> tuple[str, str]:
    """Where the halves of the network are, with that many GPUs.

    Raises:
        ValueError: if this machine has not so many, or the network no use for them.
    """
    if not 0 <= gpus <= 2:
        raise ValueError(f"the network is on 0, 1 or 2 GPUs, not on {gpus}")
    if gpus > (there := torch.cuda.device_count()):
        raise ValueError(f"{gpus} GPUs are asked for, and this machine has {there} for torch")
    return ("cpu", "cpu") if not gpus else ("cuda:0", f"cuda:{gpus - 1}")


def snapshot(module: M) -> M:
    """A copy of `module` as it is now, whose gradients go to the parameters of `module` itself.

    A graph through it keeps what it needs from here: a step that changes the parameters in place
    does not disturb it. The copy may be in another mode, and be called while others are.
    """
    # Not torch.func.functional_call, which puts the clones into the module that all threads share
    # for as long as a call takes. What deepcopy finds among its memos it does not copy again.
    clones: dict[int, object] = {id(each): each.clone() for each in module.parameters()}
    return copy.deepcopy(module, clones)


# ── data ────────────────────────────────────────────────────────────────────────────────────────


class Images(NamedTuple):
    """Images of digits, and which they show."""

    pixels: Tensor  # [N, 28, 28] uint8
    labels: Tensor  # [N] int64

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches [B, 1, 28, 28] as the network takes them, with labels [B], in that order."""
        order = torch.arange(len(self.labels)) if order is None else order
        for chosen in torch.split(order, size):
            pixels = self.pixels[chosen].unsqueeze(1).float() / 255
            yield (pixels - 0.1307) / 0.3081, self.labels[chosen]  # MNIST's mean and deviation

    def shard(self, number: int, of: int) -> "Images":
        """Those of one of several who share them."""
        return Images(self.pixels[number::of], self.labels[number::of])

    def first(self, count: int | None) -> "Images":
        return Images(self.pixels[:count], self.labels[:count])


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """The order of that many images in one epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def load(root: Path, *, train: bool) -> Images:
    """The images that are there, as torchvision reads them."""
    from torchvision.datasets import MNIST  # takes two seconds, and a parameter server needs none

    found = MNIST(str(root), train=train)
    return Images(found.data, found.targets)


def prepare(root: Path) -> str:
    """See to it that there are data for `load`, and say which."""
    raw = root / "MNIST" / "raw"
    if not digits.complete(raw):
        if digits.complete(raw, ".gz"):
            digits.unpack(raw)
        else:
            digits.write(root)
    drawn = raw / "drawn.txt"
    return f"digits {drawn.read_text().strip()}" if drawn.exists() else "MNIST"
