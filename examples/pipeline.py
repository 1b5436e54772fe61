"""A model cut over several workers, with microbatches in flight.

Each stage holds some layers and an RRef of the next stage. A microbatch goes from stage to stage as
one coroutine that calls another. The last one computes the loss, and only the loss is returned.
While the second stage works on the first microbatch, the first stage works on the second.

    python -m examples.pipeline --stages 3 --micro 4
    python -m examples.pipeline --device cuda:0    # activations travel from device to device

Under torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment of a
terminal for each worker, rank 0 is the master and the others are the stages.
"""

import argparse
import asyncio
import os
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import aiorpc_torch as aiorpc
from aiorpc_torch.autograd import DistributedOptimizer, context, parameter_rrefs

from ._textures import Shape, Textures, batches, cut, held_out, microbatches


class Stage:
    """A stage: some layers of the model, and an RRef of the next stage."""

    def __init__(self, shape: Shape, stage: int, stages: int) -> None:
        self.layers, self.device = cut(shape, stage, stages), shape.device
        self.following: aiorpc.RRef[Stage] | None = None

    async def lead_to(self, following: "aiorpc.RRef[Stage]") -> None:
        """Set the next stage, which gets what this one computes."""
        self.following = following

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, for `parameter_rrefs`."""
        return [*self.layers.parameters()]

    async def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of a microbatch, from these layers on."""
        y = await self.compute(x, True)
        if self.following is not None:
            return await aiorpc.call(self.following, Stage.loss, y, labels)
        return functional.cross_entropy(y, labels.to(y.device), reduction="sum")

    async def correct(self, x: Tensor, labels: Tensor) -> int:
        """Return the number of images that the model classifies correctly."""
        y = await self.compute(x, False)
        if self.following is not None:
            return await aiorpc.call(self.following, Stage.correct, y, labels)
        return int((y.argmax(1) == labels.to(y.device)).sum())

    @aiorpc.batched(max_size=1)
    def compute(self, xs: list[Tensor], training: list[bool]) -> list[Tensor]:
        """Compute one microbatch at a time, in the order of arrival, beside the event loop.

        So batch statistics and dropout see the microbatches in the order of the uncut model.
        """
        (x,), (train,) = xs, training
        self.layers.train(train)
        with torch.set_grad_enabled(train):
            return [self.layers(x.to(self.device))]

    async def describe(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"process {os.getpid()}, {len(self.layers)} layers, {count:,} parameters"


class Pipeline:
    """A pipeline of all stages, with an optimizer beside the parameters of each."""

    def __init__(self, stages: aiorpc.Group[Stage], optimizer: DistributedOptimizer) -> None:
        self.stages, self.optimizer = stages, optimizer

    @classmethod
    async def create(cls, workers: list[str], shape: Shape, lr: float) -> "Pipeline":
        """Make a stage on each worker, and connect each with the next one."""
        count = len(workers)
        stages = await aiorpc.create(workers, Stage, shape, aiorpc.each(range(count)), count)
        await aiorpc.remote(stages[:-1]).lead_to(aiorpc.each(stages[1:]))
        parameters = [parameter for stage in stages for parameter in await parameter_rrefs(stage)]
        made = await DistributedOptimizer.create(torch.optim.SGD, parameters, lr=lr, momentum=0.9)
        return cls(stages, made)

    async def step(self, batch: Textures, micro: int) -> float:
        """Make a step on a batch in `micro` microbatches, all in flight; return its loss."""
        first, columns = self.stages[:1], zip(*microbatches(batch, micro), strict=True)
        async with context() as ctx:
            losses = [loss async for loss in first.map(Stage.loss, *columns, in_flight=micro)]
            loss = torch.stack(losses).sum() / len(batch.labels)
            await ctx.backward(loss, timeout=60.0)
            await self.optimizer.step(ctx)
        return loss.item()

    async def accuracy(self, batch: Textures) -> float:
        """Return the part of the images that the model classifies correctly."""
        first, columns = self.stages[:1], zip(*microbatches(batch, 8), strict=True)
        correct = [count async for count in first.map(Stage.correct, *columns, in_flight=8)]
        return sum(correct) / len(batch.labels)


async def train(stages: list[str], options: argparse.Namespace) -> None:
    """Train the model in these stages, and print what it learns."""
    shape = Shape(options.blocks, options.width, options.seed, options.device)
    pipeline = await Pipeline.create(stages, shape, options.lr)
    for name, line in zip(stages, await aiorpc.remote(pipeline.stages).describe(), strict=True):
        print(f"{name}: {line}", flush=True)
    losses, start = [], time.perf_counter()
    for number, batch in enumerate(batches(options.steps, options.batch, options.seed), 1):
        losses.append(await pipeline.step(batch, options.micro))
        if number % max(1, options.steps // 10) == 0:
            recent = losses[-10:]
            print(f"step {number:4}: loss {sum(recent) / len(recent):.3f}", flush=True)
    seconds = (time.perf_counter() - start) / options.steps
    print(f"{seconds * 1e3:.1f} ms a step of {options.batch} images")
    accuracy = await pipeline.accuracy(held_out(1024, options.seed))
    print(f"held-out accuracy: {accuracy:.1%} (by chance: 12.5%)")


async def main(options: argparse.Namespace) -> None:
    """Train on rank 0; serve on the other workers until rank 0 has left."""
    names = ["master", *(f"stage{number}" for number in range(options.stages))]
    rank = os.environ.get("RANK")  # of torchrun, or of a terminal for each worker
    local = aiorpc.local_world(names[1:], name="master", **options.maps)
    async with aiorpc.worker(names[int(rank)], **options.maps) if rank else local as me:
        await (me.serve("master") if me.rank else train(names[1:], options))


if __name__ == "__main__":
    world_size = int(os.environ.get("WORLD_SIZE", 3))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=world_size - 1, help="parts of the model")
    parser.add_argument("--micro", type=int, default=4, help="microbatches in a batch")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--blocks", type=int, default=6, help="residual blocks in the model")
    parser.add_argument("--width", type=int, default=16, help="channels in the model")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--device", default="cpu", help="of all stages: cpu, cuda:0, ...")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps, as a check")
    options = parser.parse_args()
    if not 1 <= options.stages <= options.blocks:
        parser.error(f"--stages is between 1 and the number of --blocks, {options.blocks}")
    if not 1 <= options.micro <= options.batch:
        parser.error(f"--micro is between 1 and the size of a --batch, {options.batch}")
    if options.quick:
        options.steps = min(options.steps, 40)
    options.maps = {"device_maps": None if options.device == "cpu" else "auto"}
    asyncio.run(main(options))
