"""A classifier, and synthetic pictures that it can learn.

This module has models and data, and no code for workers.
"""

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.models import get_model

SIDE = 64  # pixels
NOISE = 1.0  # standard deviation; that of a class's pattern is 1 too
PART = 4 << 20  # bytes of tensors that are sent together, about
HELD_OUT = 1_000_000  # index of the first held-out picture

Sample = tuple[Tensor, Tensor]

Learned = dict[int, Tensor]
"""Results of a batch by index: its mean loss, then each parameter's gradient, then each buffer."""


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model, its data and its optimizer."""
    group = parser.add_argument_group("training")
    group.add_argument("--model", default="resnet50", help="small, or any of torchvision's")
    group.add_argument("--classes", type=int, default=30)
    group.add_argument("--images", type=int, default=6000, help="training images of all trainers")
    group.add_argument("--batch", type=int, default=20, help="images of a trainer in a step")
    group.add_argument("--iterations", type=int, default=60, help="steps of the model")
    group.add_argument("--lr", type=float, default=0.01)
    group.add_argument("--momentum", type=float, default=0.9)
    group.add_argument("--device", default="cpu", help="device of the trainers")
    group.add_argument("--compress", default="float32", choices=["float32", "bfloat16"])
    group.add_argument("--seed", type=int, default=0)


class Images(Dataset[Sample]):
    """Pictures [3, 64, 64], one pattern for each class, with noise. A seed determines them."""

    def __init__(self, classes: int, seed: int, indices: range) -> None:
        coarse = torch.randn(classes, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.patterns = nn.functional.interpolate(coarse, size=(SIDE, SIDE))
        self.seed, self.indices = seed, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> Sample:
        index = self.indices[position]
        label = index % len(self.patterns)
        generator = torch.Generator().manual_seed((self.seed << 32) + index)
        noise = torch.randn(3, SIDE, SIDE, generator=generator)
        return self.patterns[label] + NOISE * noise, torch.tensor(label)


def batches(options: argparse.Namespace, part: int, parts: int) -> Iterator[Sample]:
    """Yield batches of one part of the images without end, shuffled anew each epoch."""
    images = Images(options.classes, options.seed, range(options.images))
    sampler: DistributedSampler[Sample] = DistributedSampler(
        images, parts, part, seed=options.seed, drop_last=True
    )
    loader = DataLoader(images, options.batch, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def new_model(options: argparse.Namespace) -> nn.Module:
    """Make the initial model, the same in every process."""
    torch.manual_seed(options.seed)
    if options.model == "small":
        return small(options.classes)
    model: nn.Module = get_model(options.model, num_classes=options.classes)
    return model


def small(classes: int) -> nn.Module:
    """Make three convolutions with BatchNorm: 34,000 parameters for ten classes."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 16, 32, 64)):
        convolution = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, classes))


def learn(
    model: nn.Module,
    batch: Sample,
    options: argparse.Namespace,
    tell: Callable[[Learned], object],
) -> None:
    """Compute a batch's results and pass them to `tell`, in parts of some megabytes.

    Each part is passed as soon as backward has made it. All tensors are on the CPU, gradients in
    the dtype in which they are sent.
    """
    images, labels = (each.to(options.device) for each in batch)
    loss = nn.functional.cross_entropy(model(images), labels)
    parts = Parts(tell)
    parameters = [*model.parameters()]
    with contextlib.ExitStack() as hooks:
        for place, parameter in enumerate(parameters, 1):
            hook = functools.partial(_give, parts, place, getattr(torch, options.compress))
            told = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            hooks.enter_context(told)
        loss.backward()  # type: ignore[no-untyped-call]
    for place, buffer in enumerate(model.buffers(), 1 + len(parameters)):
        parts.put(place, buffer.cpu())
    parts.put(0, loss.detach().cpu())  # last, so that a later request for a step finds the loss
    parts.end()


def _give(parts: "Parts", place: int, dtype: torch.dtype, parameter: Tensor) -> None:
    # A gradient's rounding error changes each time and is averaged away. The model's would not be:
    # most steps are smaller than the distance of two bfloat16.
    assert parameter.grad is not None
    parts.put(place, parameter.grad.to("cpu", dtype))
    parameter.grad = None


class Parts:
    """A buffer that collects tensors up to some megabytes and passes them on together."""

    def __init__(self, tell: Callable[[Learned], object]) -> None:
        self._tell = tell
        self._part: Learned = {}

    def put(self, place: int, tensor: Tensor) -> None:
        """Add a tensor."""
        self._part[place] = tensor
        if sum(each.nbytes for each in self._part.values()) >= PART:
            self.end()

    def end(self) -> None:
        """Pass on the remaining tensors."""
        if self._part:
            part, self._part = self._part, {}
            self._tell(part)


def adopt(model: nn.Module, state: dict[str, Tensor], options: argparse.Namespace) -> None:
    """Make `state` the state of the model, without a copy if it computes on the CPU."""
    model.load_state_dict(state, assign=options.device == "cpu")


def new_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), options.lr, options.momentum, fused=True)


@torch.no_grad()
def advance(model: nn.Module, optimizer: torch.optim.Optimizer, means: Learned) -> float:
    """Make a step with the means of the trainers' results; return the mean loss.

    Running statistics become the mean of the trainers'. Tensors without a result stay unchanged: a
    parameter that no loss depends on, or a part that came too late for the step.
    """
    parameters = [*model.parameters()]
    for place, parameter in enumerate(parameters, 1):
        mean = means.pop(place, None)
        parameter.grad = None if mean is None else mean.to(parameter.device)
    for place, buffer in enumerate(model.buffers(), 1 + len(parameters)):
        buffer.copy_(means.get(place, buffer))
    optimizer.step()
    optimizer.zero_grad()
    return float(means[0])


def on_cpu(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, without a copy if they are on the CPU."""
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@torch.inference_mode()
def accuracy(model: nn.Module, options: argparse.Namespace, images: int = 200) -> float:
    """Return the part of held-out images that the model classifies correctly in eval mode."""
    held_out = Images(options.classes, options.seed, range(HELD_OUT, HELD_OUT + images))
    model.eval()
    where = next(model.parameters()).device
    right = sum(
        int((model(pictures.to(where)).argmax(1).cpu() == labels).sum())
        for pictures, labels in DataLoader(held_out, options.batch)
    )
    return right / images


class Mean:
    """The weighted mean of results. It holds one of each tensor, however many are added."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, int]] = {}  # sums and their weights, by index

    def add(self, learned: Learned, weight: int) -> Self:
        """Add the results of a batch, or a part of these, in float32.

        The first tensor of an index is not copied; the mean owns it from then on.
        """
        for place, tensor in learned.items():
            if place in self._sums:
                total, before = self._sums[place]
                self._sums[place] = total.add_(tensor, alpha=weight), before + weight
            else:
                self._sums[place] = tensor.float().mul_(weight), weight
        return self

    def take(self) -> Learned:
        """Return the mean of the results added since the last call."""
        sums, self._sums = self._sums, {}
        return {place: total.div_(weight) for place, (total, weight) in sums.items()}
