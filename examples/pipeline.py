"""A model cut over several workers, with microbatches in flight.

Each stage holds some layers and an RRef of the next stage. A microbatch goes from stage to stage as
one coroutine that calls another. The last one computes the loss, and only the loss is returned.
While the second stage works on the first microbatch, the first stage works on the second.

    python -m examples.pipeline --stages 3 --micro 4
"""

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, batched, call, remote
from aiorpc_torch.autograd import DistributedOptimizer, context, parameter_rrefs

from ._launch import add_world, end, launch, serve
from ._plot import curves
from ._textures import Shape, Textures, batches, cut, held_out, microbatches

TIMEOUT = 60.0  # seconds, the timeout of a backward


class Stage:
    """A stage: some layers of the model, and an RRef of the next stage."""

    def __init__(
        self, shape: Shape, stage: int, stages: int, following: "RRef[Stage] | None"
    ) -> None:
        self.layers = cut(shape, stage, stages)
        self.following = following

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, for `parameter_rrefs`."""
        return [*self.layers.parameters()]

    async def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of a microbatch, from these layers on."""
        y = await self.compute(x, True)
        if self.following is not None:
            return await call(self.following, Stage.loss, y, labels)
        return functional.cross_entropy(y, labels, reduction="sum")

    async def correct(self, x: Tensor, labels: Tensor) -> int:
        """Return the number of images that the model classifies correctly."""
        y = await self.compute(x, False)
        if self.following is not None:
            return await call(self.following, Stage.correct, y, labels)
        return int((y.argmax(1) == labels).sum())

    @batched(max_size=1)
    def compute(self, xs: list[Tensor], training: list[bool]) -> list[Tensor]:
        """Compute one microbatch at a time, in the order of arrival, beside the event loop.

        So batch statistics and dropout see the microbatches in the order of the uncut model.
        """
        (x,), (train,) = xs, training
        self.layers.train(train)
        with torch.set_grad_enabled(train):
            return [self.layers(x)]

    async def describe(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"process {os.getpid()}, {len(self.layers)} layers, {count:,} parameters"


class Pipeline:
    """A pipeline of all stages, with an optimizer beside the parameters of each."""

    def __init__(self, stages: list[RRef[Stage]], optimizer: DistributedOptimizer) -> None:
        self.stages = stages
        self.optimizer = optimizer

    @classmethod
    async def create(cls, workers: list[str], shape: Shape, lr: float) -> "Pipeline":
        """Make a stage on each worker, the last one first, since each needs the next RRef."""
        stages: list[RRef[Stage]] = []
        for number in reversed(range(len(workers))):
            following = stages[0] if stages else None
            stages.insert(
                0,
                await aiorpc.create(workers[number], Stage, shape, number, len(workers), following),
            )
        parameters = [each for stage in stages for each in await parameter_rrefs(stage)]
        optimizer = await DistributedOptimizer.create(
            torch.optim.SGD, parameters, lr=lr, momentum=0.9
        )
        return cls(stages, optimizer)

    async def step(self, batch: Textures, micro: int) -> float:
        """Make a step on a batch in `micro` microbatches, all in flight; return its loss."""
        first = self.stages[0]
        async with context() as ctx:
            parts = [call(first, Stage.loss, x, labels) for x, labels in microbatches(batch, micro)]
            loss = torch.stack(await asyncio.gather(*parts)).sum() / len(batch.labels)
            await ctx.backward(loss, timeout=TIMEOUT)
            await self.optimizer.step(ctx)
        return loss.item()

    async def accuracy(self, batch: Textures) -> float:
        """Return the part of the images that the model classifies correctly."""
        first = self.stages[0]
        parts = [call(first, Stage.correct, x, labels) for x, labels in microbatches(batch, 8)]
        return sum(await asyncio.gather(*parts)) / len(batch.labels)


async def main(me: aiorpc.Worker, options: argparse.Namespace) -> list[float] | None:
    """Train in the first worker; serve in the others."""
    if me.rank:
        await serve("master")
        return None
    stages = stage_names(options)
    shape = Shape(options.blocks, options.width, options.seed)
    pipeline = await Pipeline.create(stages, shape, options.lr)
    console = Console(highlight=False)
    for name, stage in zip(stages, pipeline.stages, strict=True):
        console.print(f"{name}: {await remote(stage).describe()}")
    losses = await train(pipeline, options, console)
    accuracy = await pipeline.accuracy(held_out(1024, options.seed))
    console.print(f"held-out accuracy: {accuracy:.1%} (by chance: 12.5%)")
    end()
    return losses


async def train(pipeline: Pipeline, options: argparse.Namespace, console: Console) -> list[float]:
    """Train; return the loss of each step."""
    losses, times = [], []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=options.steps)
        for number, batch in enumerate(batches(options.steps, options.batch, options.seed), 1):
            start = time.perf_counter()
            losses.append(await pipeline.step(batch, options.micro))
            times.append(time.perf_counter() - start)
            progress.update(task, advance=1)
            if number % max(1, options.steps // 10) == 0:
                recent = statistics.mean(losses[-10:])
                progress.print(f"step {number:4}: loss {recent:.3f}")
    console.print(
        f"{statistics.median(times) * 1e3:.1f} ms a step of {options.batch} images in "
        f"{options.micro} microbatches through {options.stages} stages",
    )
    return losses


def stage_names(options: argparse.Namespace) -> list[str]:
    return [f"stage{number}" for number in range(options.stages)]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2, help="workers that hold the model")
    parser.add_argument("--micro", type=int, default=4, help="microbatches in a batch")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--blocks", type=int, default=6, help="residual blocks in the model")
    parser.add_argument("--width", type=int, default=16, help="channels in the model")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps, as a check")
    parser.add_argument("--plot", type=Path, default=Path("out/pipeline.png"))
    add_world(parser)
    options = parser.parse_args()
    if not 1 <= options.stages <= options.blocks:
        parser.error(f"--stages is between 1 and the number of --blocks, {options.blocks}")
    if not 1 <= options.micro <= options.batch:
        parser.error(f"--micro is between 1 and the size of a --batch, {options.batch}")
    if options.quick:
        options.steps = min(options.steps, 40)
    return options


if __name__ == "__main__":
    options = arguments()
    if losses := launch(main, ["master", *stage_names(options)], options):
        title = f"A model in {options.stages} stages"
        print(
            "loss:",
            curves(options.plot, {"loss": losses}, title=title, xlabel="step", ylabel="loss"),
        )
