"""A parameter server with distributed autograd: a network on another worker learns digits.

The network is whole on the parameter server. Each trainer has a shard of the images: it sends a
batch, gets log-probabilities, computes the loss and sends the gradients back through a graph on
both workers. Any number of trainers do so at once, without waiting for each other.

    python -m examples.mnist --world-size 3

Or one terminal, or machine, for each worker, of which rank 0 is the parameter server:

    python -m examples.mnist --world-size 3 --master-addr 10.0.0.1 --rank 0
"""

import argparse
import asyncio
import math
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from torch import Tensor, nn
from torch.nn import functional

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, create, remote
from aiorpc_torch.autograd import DistributedOptimizer, context, parameter_rrefs

from ._launch import add_world, end, launch, serve
from ._mnist import Net, devices, load, prepare, shuffled, snapshot
from ._plot import curves

BACKWARD = 60.0  # seconds, the timeout of a backward
RECENT = 10  # losses in a running mean


class ParameterServer:
    """A parameter server: the network, for any number of trainers at once."""

    def __init__(self, gpus: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net(*devices(gpus))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that optimizers change."""
        return self.net.parameters()

    def forward(self, images: Tensor, *, training: bool) -> Tensor:
        """Return log-probabilities [B, 10] of images [B, 1, 28, 28].

        The graph keeps the current parameters, whatever steps follow before the backward. The mode
        is this call's own: one trainer may evaluate while others train.
        """
        with torch.set_grad_enabled(training):
            return snapshot(self.net).train(training)(images)  # type: ignore[no-any-return]


class Trainer:
    """A trainer with one of `many` shards of the images, and an optimizer beside the parameters."""

    def __init__(
        self, ps: RRef[ParameterServer], shard: int, many: int, options: argparse.Namespace
    ) -> None:
        self.ps, self.options = ps, options
        self.images = load(options.data, train=True).first(options.images).shard(shard, many)
        self.test = load(options.data, train=False).shard(shard, many)

    async def prepare(self) -> int:
        """Make the optimizer; return the number of losses that `train` will yield."""
        params = await parameter_rrefs(self.ps)
        self.opt = await DistributedOptimizer.create(torch.optim.SGD, params, lr=self.options.lr)
        batches: int = math.ceil(len(self.images.labels) / self.options.batch_size)
        return batches * int(self.options.epochs)

    async def train(self) -> AsyncIterator[float]:
        """Train for all epochs; yield the loss of each iteration."""
        for epoch in range(self.options.epochs):
            order = shuffled(len(self.images.labels), self.options.seed, epoch)
            for images, labels in self.images.batches(self.options.batch_size, order):
                yield await self._step(images, labels)

    async def _step(self, images: Tensor, labels: Tensor) -> float:
        async with context() as ctx:
            found = await remote(self.ps).forward(images, training=True)
            loss = functional.nll_loss(found, labels)
            await ctx.backward([loss], timeout=BACKWARD)
            await self.opt.step(ctx)
        return loss.item()

    async def evaluate(self) -> tuple[int, int]:
        """Return the numbers of recognised and of all test images of this shard."""
        right = 0
        for images, labels in self.test.batches(250):
            found = await remote(self.ps).forward(images, training=False)
            right += int((found.argmax(1) == labels).sum())
        return right, len(self.test.labels)


class Result(NamedTuple):
    """The result of a run, on rank 0."""

    losses: dict[str, list[float]]  # by trainer
    seconds: float  # of training
    right: int  # test images recognised
    tested: int


async def main(me: aiorpc.Worker, options: argparse.Namespace) -> Result | None:
    """Have the others train, on rank 0; serve until the end, on the others."""
    if me.rank:
        await serve("ps")
        return None
    ps, many = RRef(ParameterServer(options.num_gpus, options.seed)), len(me.peers)
    trainers = await asyncio.gather(
        *(create(name, Trainer, ps, shard, many, options) for shard, name in enumerate(me.peers))
    )
    iterations = await asyncio.gather(*(remote(trainer).prepare() for trainer in trainers))
    print(f"{many} trainers, {sum(iterations):,} iterations", flush=True)
    losses: dict[str, list[float]] = {name: [] for name in me.peers}
    start = time.monotonic()
    with Progress(*COLUMNS) as progress:
        bars = [
            progress.add_task(name, total=total, loss=math.nan)
            for name, total in zip(me.peers, iterations, strict=True)
        ]
        shown = zip(trainers, losses.values(), bars, strict=True)
        await asyncio.gather(*(follow(*each, progress) for each in shown))
    seconds = time.monotonic() - start
    found = await asyncio.gather(*(remote(trainer).evaluate() for trainer in trainers))
    end()
    right, tested = map(sum, zip(*found, strict=True))
    return Result(losses, seconds, right, tested)


COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TextColumn("loss {task.fields[loss]:.3f}"),
)


async def follow(
    trainer: RRef[Trainer], losses: list[float], bar: TaskID, progress: Progress
) -> None:
    """Have one trainer train, and show its progress."""
    async for loss in remote(trainer).train():
        losses.append(loss)
        progress.update(bar, advance=1, loss=statistics.mean(losses[-RECENT:]))


def report(result: Result, options: argparse.Namespace) -> None:
    """Print the figures and draw the losses."""
    count = sum(map(len, result.losses.values()))
    rate = count / result.seconds
    print(f"{count:,} iterations in {result.seconds:.1f} s: {rate:.1f} iterations/s")
    print(f"accuracy: {result.right / result.tested:.4f} of {result.tested:,} test images")
    means = {
        name: [statistics.mean(each[max(0, n - RECENT) : n + 1]) for n in range(len(each))]
        for name, each in result.losses.items()
    }
    path = curves(
        options.plot,
        means,
        title="MNIST through a parameter server",
        xlabel="iteration",
        ylabel=f"loss, mean of the last {RECENT}",
    )
    print(f"losses: {path}")


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--num-gpus", type=int, default=0, help="number of rank 0's GPUs: 0, 1 or 2"
    )
    parser.add_argument("--data", type=Path, default=Path("out/digits"), help="folder of MNIST/raw")
    parser.add_argument("--images", type=int, help="training images (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="three epochs of 1,200 images, in batches of 16"
    )
    parser.add_argument("--plot", type=Path, default=Path("out/mnist.png"))
    add_world(parser, world_size=int(os.environ.get("WORLD_SIZE", 3)))
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.batch_size = 3, 16
        options.images = options.images or 1200
    if options.world_size < 2 or min(options.epochs, options.batch_size) < 1:
        parser.error("it takes a trainer, an epoch and a batch at least")
    is_ps = not (options.rank or int(os.environ.get("RANK", 0)))
    try:
        if is_ps:
            devices(options.num_gpus)
    except ValueError as exc:
        parser.error(f"--num-gpus: {exc}")
    return options


if __name__ == "__main__":
    options = arguments()
    print(f"data: {prepare(options.data)}", flush=True)
    names = ["ps", *(f"trainer{n}" for n in range(1, options.world_size))]
    result = launch(main, names, options)
    if result is not None:
        report(result, options)
