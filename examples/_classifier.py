"""A classifier, and made pictures that it can be seen to learn.

Knows models and data, and nothing of who computes where.
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
PART = 4 << 20  # bytes of the tensors that travel together, about
HELD_OUT = 1_000_000  # where the pictures begin that are never trained on

Sample = tuple[Tensor, Tensor]

Learned = dict[int, Tensor]
"""What a batch says, by place: first its mean loss, then each parameter's gradient, each buffer."""


def add_training(parser: argparse.ArgumentParser) -> None:
    """Let the command line say what is trained, and on what."""
    group = parser.add_argument_group("training")
    group.add_argument("--model", default="resnet50", help="small, or any of torchvision's")
    group.add_argument("--classes", type=int, default=30)
    group.add_argument("--images", type=int, default=6000, help="to train on, of all trainers")
    group.add_argument("--batch", type=int, default=20, help="images of one trainer a step")
    group.add_argument("--iterations", type=int, default=60, help="steps of the model")
    group.add_argument("--lr", type=float, default=0.01)
    group.add_argument("--momentum", type=float, default=0.9)
    group.add_argument("--device", default="cpu", help="where the trainers compute")
    group.add_argument("--compress", default="float32", choices=["float32", "bfloat16"])
    group.add_argument("--seed", type=int, default=0)


class Images(Dataset[Sample]):
    """Pictures [3, 64, 64] of a pattern for each class, under noise: the same for the same seed."""

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
    """The batches of one part of the images, without end, shuffled anew each epoch."""
    images = Images(options.classes, options.seed, range(options.images))
    sampler: DistributedSampler[Sample] = DistributedSampler(
        images, parts, part, seed=options.seed, drop_last=True
    )
    loader = DataLoader(images, options.batch, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def new_model(options: argparse.Namespace) -> nn.Module:
    """The model with which everybody begins."""
    torch.manual_seed(options.seed)
    if options.model == "small":
        return small(options.classes)
    model: nn.Module = get_model(options.model, num_classes=options.classes)
    return model


def small(classes: int) -> nn.Module:
    """Three convolutions, each with its BatchNorm: 34,000 parameters for ten classes."""
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
    """Tell what a batch says, in parts of some megabytes, each as soon as backward is behind it.

    All on the CPU; gradients in the dtype that they travel in.
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
    parts.put(0, loss.detach().cpu())  # last, so whoever asks for a step after it has told its loss
    parts.end()


def _give(parts: "Parts", place: int, dtype: torch.dtype, parameter: Tensor) -> None:
    # A gradient's rounding is another one each time, and is averaged away. The model's would not
    # be: most steps are smaller than the distance of two bfloat16.
    assert parameter.grad is not None
    parts.put(place, parameter.grad.to("cpu", dtype))
    parameter.grad = None


class Parts:
    """Collects tensors until they are some megabytes, and tells of them together."""

    def __init__(self, tell: Callable[[Learned], object]) -> None:
        self._tell = tell
        self._part: Learned = {}

    def put(self, place: int, tensor: Tensor) -> None:
        """One more."""
        self._part[place] = tensor
        if sum(each.nbytes for each in self._part.values()) >= PART:
            self.end()

    def end(self) -> None:
        """Tell of what is left."""
        if self._part:
            part, self._part = self._part, {}
            self._tell(part)


def adopt(model: nn.Module, state: dict[str, Tensor], options: argparse.Namespace) -> None:
    """Make `state` the model's: without a copy where it computes on the CPU."""
    model.load_state_dict(state, assign=options.device == "cpu")


def new_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), options.lr, options.momentum, fused=True)


@torch.no_grad()
def advance(model: nn.Module, optimizer: torch.optim.Optimizer, means: Learned) -> float:
    """One step with the means of what trainers have learned; the mean loss.

    Running statistics become the mean of the trainers'. What nobody has told of stays as it is: a
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
    """Its parameters and buffers by name: themselves, if they are there."""
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@torch.inference_mode()
def accuracy(model: nn.Module, options: argparse.Namespace, images: int = 200) -> float:
    """The part of held-out images that the model, in eval mode, puts in the right class."""
    held_out = Images(options.classes, options.seed, range(HELD_OUT, HELD_OUT + images))
    model.eval()
    where = next(model.parameters()).device
    right = sum(
        int((model(pictures.to(where)).argmax(1).cpu() == labels).sum())
        for pictures, labels in DataLoader(held_out, options.batch)
    )
    return right / images


class Mean:
    """The weighted mean of what batches say. Holds one of each tensor, however many are added."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, int]] = {}  # and their weights, by place

    def add(self, learned: Learned, weight: int) -> Self:
        """Add what a batch says, or a part of it, in float32.

        What is the first at its place is not copied: it is the mean's own from now on.
        """
        for place, tensor in learned.items():
            if place in self._sums:
                total, before = self._sums[place]
                self._sums[place] = total.add_(tensor, alpha=weight), before + weight
            else:
                self._sums[place] = tensor.float().mul_(weight), weight
        return self

    def take(self) -> Learned:
        """The mean of what was added since the last time."""
        sums, self._sums = self._sums, {}
        return {place: total.div_(weight) for place, (total, weight) in sums.items()}
