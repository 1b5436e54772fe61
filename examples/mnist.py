"""A parameter server with distributed autograd: a network on another worker learns digits.

The network is whole on the parameter server. Each trainer has a shard of the images: it sends a
batch, gets log-probabilities, computes the loss and sends the gradients back through a graph on
both workers. Any number of trainers do so at once, without waiting for each other in an epoch.

    python -m examples.mnist --world-size 3
    python -m examples.mnist --num-gpus 1 --device cuda:0  # activations from device to device

Under torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment of a
terminal for each worker, rank 0 is the parameter server and all others are trainers.
"""

import argparse
import asyncio
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import aiorpc_torch as aiorpc
from aiorpc_torch.autograd import DistributedOptimizer, context, parameter_rrefs

from ._mnist import Net, devices, load, prepare, shuffled, snapshot


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
        self, ps: aiorpc.RRef[ParameterServer], shard: int, many: int, options: argparse.Namespace
    ) -> None:
        self.ps, self.options = aiorpc.remote(ps), options
        part = slice(shard, None, many)
        self.images = load(options.data, train=True).part(slice(options.images)).part(part)
        self.test = load(options.data, train=False).part(part)

    async def prepare(self) -> int:
        """Make the optimizer; return the number of iterations of an epoch."""
        params = await parameter_rrefs(self.ps)
        self.opt = await DistributedOptimizer.create(torch.optim.SGD, params, lr=self.options.lr)
        return math.ceil(len(self.images.labels) / int(self.options.batch_size))

    async def train(self, epoch: int) -> list[float]:
        """Train for an epoch; return the loss of each iteration."""
        order = shuffled(len(self.images.labels), self.options.seed, epoch)
        batches = self.images.batches(self.options.batch_size, order)
        return [await self.step(images, labels) for images, labels in batches]

    async def step(self, images: Tensor, labels: Tensor) -> float:
        """Learn a batch; return its loss."""
        async with context() as ctx:
            found = await self.ps.forward(images.to(self.options.device), training=True)
            loss = functional.nll_loss(found, labels.to(found.device))
            await ctx.backward([loss], timeout=60.0)
            await self.opt.step(ctx)
        return loss.item()

    async def evaluate(self) -> tuple[int, int]:
        """Return the numbers of recognised and of all test images of this shard."""
        right = 0
        for images, labels in self.test.batches(250):
            found = await self.ps.forward(images.to(self.options.device), training=False)
            right += int((found.argmax(1).cpu() == labels).sum())
        return right, len(self.test.labels)


async def train(me: aiorpc.types.Worker, options: argparse.Namespace) -> None:
    """Have all other workers train the network of this one."""
    ps, many = aiorpc.RRef(ParameterServer(options.num_gpus, options.seed)), len(me.peers)
    trainers = await aiorpc.create(me.peers, Trainer, ps, aiorpc.each(range(many)), many, options)
    count, start = options.epochs * sum(await aiorpc.remote(trainers).prepare()), time.monotonic()
    print(f"{many} trainers, {count:,} iterations", flush=True)
    for epoch in range(options.epochs):
        losses = [loss for shard in await aiorpc.remote(trainers).train(epoch) for loss in shard]
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}", flush=True)
    seconds = time.monotonic() - start
    print(f"{count:,} iterations in {seconds:.1f} s: {count / seconds:.1f} iterations/s")
    right, tested = map(sum, zip(*await aiorpc.remote(trainers).evaluate(), strict=True))
    print(f"accuracy: {right / tested:.4f} of {tested:,} test images")


async def main(options: argparse.Namespace) -> None:
    """Train on rank 0; serve on the other workers until rank 0 has left."""
    names = ["ps", *(f"trainer{number}" for number in range(1, options.world_size))]
    rank = os.environ.get("RANK")  # of torchrun, or of a terminal for each worker
    local = aiorpc.local_world(names[1:], name="ps", **options.maps)
    async with aiorpc.worker(names[int(rank)], **options.maps) if rank else local as me:
        await (me.serve("ps") if me.rank else train(me, options))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", 3)))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-gpus", type=int, default=0, help="the server's GPUs: 0, 1 or 2")
    parser.add_argument("--device", default="cpu", help="of the trainers: cpu, cuda:0, ...")
    parser.add_argument("--data", type=Path, default=Path("out/digits"), help="folder of MNIST/raw")
    parser.add_argument("--images", type=int, help="training images (default: all)")
    parser.add_argument("--quick", action="store_true", help="three epochs of 1,200 images")
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.batch_size, options.images = 3, 16, options.images or 1200
    print(f"data: {prepare(options.data)}", flush=True)
    options.maps = {"device_maps": None if options.device == "cpu" else "auto"}
    asyncio.run(main(options))
