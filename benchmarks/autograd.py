"""What does a step of training through a remote module cost, against torch's blocking API?

A step: open a context, one forward on another worker, backward, a step of its optimizer, close. And
without the optimizer, eight contexts at once; torch's take turns, since one thread has one context.

    python -m benchmarks.autograd [--quick] [--repeat N]
"""

import argparse
import asyncio
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import autograd as torchs
from torch.distributed import rpc
from torch.distributed.autograd import backward  # type: ignore[attr-defined]
from torch.distributed.optim import DistributedOptimizer as TorchOptimizer
from torch.distributed.rpc import RRef

import aiorpc_torch as aiorpc
from aiorpc_torch import remote
from aiorpc_torch.autograd import DistributedOptimizer, context, parameter_rrefs

from ._compare import Row, parse, show, take_turns

X = torch.rand(8, 16, requires_grad=True)
TOGETHER = 8


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)

    async def on_loop(self, x: Tensor) -> Tensor:
        return self.forward(x)


def forward(rref: RRef[Net], x: Tensor) -> Tensor:
    return rref.local_value()(x)  # type: ignore[no-any-return]


async def main(given: argparse.Namespace) -> list[Row]:
    steps = 20 if given.quick else 200
    async with aiorpc.local_world(["server"]):
        net = await aiorpc.create("server", Net)
        params = await parameter_rrefs(net)
        opt = await DistributedOptimizer.create(torch.optim.SGD, params, lr=0.01)
        raw_opt = TorchOptimizer(torch.optim.SGD, params, lr=0.01)  # type: ignore[no-untyped-call]
        raw = partial(raw_steps, net, raw_opt, steps)
        rows = []
        for name in ("forward", "on_loop"):
            runs = await take_turns(given.repeat, partial(our_steps, net, name, opt, steps), raw)
            what = "async def" if name == "on_loop" else "def"
            rows.append(Row(f"a step through {what}", "µs", runs, "≤ 1.15"))
        together = partial(our_backwards, net, steps)
        runs = await take_turns(given.repeat, together, partial(raw_backwards, net, steps))
        return [*rows, Row(f"forward and backward, {TOGETHER} at once", "contexts/s", runs)]


async def our_step(net: RRef[Net], name: str, opt: DistributedOptimizer) -> None:
    async with context() as ctx:
        y = await getattr(remote(net), name)(X)
        await ctx.backward([y.sum()])
        await opt.step(ctx)


async def our_steps(net: RRef[Net], name: str, opt: DistributedOptimizer, steps: int) -> float:
    times = []
    for _ in range(steps):
        start = perf_counter()
        await our_step(net, name, opt)
        times.append(perf_counter() - start)
    return median(times) * 1e6


def raw_steps(net: RRef[Net], opt: Any, steps: int) -> float:
    times = []
    for _ in range(steps):
        start = perf_counter()
        with torchs.context() as number:
            y = rpc.rpc_sync("server", forward, args=(net, X))
            backward(number, [y.sum()])
            opt.step(number)
        times.append(perf_counter() - start)
    return median(times) * 1e6


async def our_backwards(net: RRef[Net], steps: int) -> float:
    async def train() -> None:
        for _ in range(steps // TOGETHER):
            async with context() as ctx:
                await ctx.backward([(await remote(net).on_loop(X)).sum()])

    start = perf_counter()
    await asyncio.gather(*(train() for _ in range(TOGETHER)))
    return steps // TOGETHER * TOGETHER / (perf_counter() - start)


def raw_backwards(net: RRef[Net], steps: int) -> float:
    start = perf_counter()
    for _ in range(steps):
        with torchs.context() as number:
            backward(number, [rpc.rpc_sync("server", forward, args=(net, X)).sum()])
    return steps / (perf_counter() - start)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    show(asyncio.run(main(parse(parser))))
