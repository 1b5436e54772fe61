"""Common parts of the MNIST programs: the network, its snapshots, the data and their shards.

It has no code for workers or calls. `_reference/mnist.py` trains the same network on the same
images.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import _digits

M = TypeVar("M", bound=nn.Module)


class Net(nn.Module):
    """A network of two convolutions, dropout and two linear layers, on one or two devices."""

    def __init__(self, first: str = "cpu", second: str = "cpu") -> None:
        super().__init__()
        self.first, self.second = first, second
        features = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
        self.features = nn.Sequential(*features, nn.MaxPool2d(2), nn.Dropout2d(0.25), nn.Flatten())
        hidden = nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(0.5)
        self.classes = nn.Sequential(*hidden, nn.Linear(128, 10)).to(second)
        self.features.to(first)

    def forward(self, images: Tensor) -> Tensor:
        """Return log-probabilities [B, 10] of images [B, 1, 28, 28], on the images' device."""
        features = self.features(images.to(self.first)).to(self.second)
        return functional.log_softmax(self.classes(features), dim=1).to(images.device)


def devices(gpus: int) -> tuple[str, str]:
    """Return the devices of the network's halves for `gpus` GPUs.

    Raises:
        ValueError: if this machine has fewer, or the network cannot use as many.
    """
    most = min(2, torch.cuda.device_count())
    if not 0 <= gpus <= most:
        raise ValueError(f"number of GPUs must be between 0 and {most} here, got {gpus}")
    return ("cpu", "cpu") if not gpus else ("cuda:0", f"cuda:{gpus - 1}")


def snapshot(module: M) -> M:
    """Copy `module` as it is now; gradients of the copy go to the parameters of `module`.

    A graph through the copy keeps the copied values, so a step that changes the parameters in place
    does not disturb it. The copy may have another mode and run beside other copies.
    """
    # Not torch.func.functional_call, which puts the clones into the shared module during a call.
    # deepcopy does not copy objects that are in its memo.
    clones: dict[int, object] = {id(each): each.clone() for each in module.parameters()}
    return copy.deepcopy(module, clones)


class Images(NamedTuple):
    """Images of digits and their labels."""

    pixels: Tensor  # [N, 28, 28] uint8
    labels: Tensor  # [N] int64

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches [B, 1, 28, 28] for the network with labels [B], in that order."""
        order = torch.arange(len(self.labels)) if order is None else order
        for chosen in torch.split(order, size):
            pixels = self.pixels[chosen].unsqueeze(1).float() / 255
            yield (pixels - 0.1307) / 0.3081, self.labels[chosen]  # MNIST's mean and deviation

    def part(self, where: slice) -> "Images":
        return Images(self.pixels[where], self.labels[where])


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of `count` images in one epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def load(root: Path, *, train: bool) -> Images:
    """Return the images under `root`, as torchvision reads them."""
    from torchvision.datasets import MNIST  # takes two seconds, and a server needs no data

    found = MNIST(str(root), train=train)
    return Images(found.data, found.targets)


def prepare(root: Path) -> str:
    """Make data for `load` if there are none; return a description of the data."""
    raw = root / "MNIST" / "raw"
    if not _digits.complete(raw):
        _digits.write(root)
    drawn = raw / "drawn.txt"
    return f"digits {drawn.read_text().strip()}" if drawn.exists() else "MNIST"
