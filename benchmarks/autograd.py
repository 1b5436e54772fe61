"""What does a step of training through a remote module cost, against torch's blocking API?

A step: open a context, one forward on another worker, backward, a step of its optimizer, close.
Each side runs in processes of its own, one after the other. Then both run in one world, whose
threads this library has made quicker for both. A last row has no optimizer and eight contexts at
once; torch's contexts run one after another, since a thread has one context.

    python -m benchmarks.autograd [--quick] [--repeat N]
"""

import argparse
import asyncio
import tempfile
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.distributed import autograd as torchs, rpc
from torch.distributed.autograd import backward  # type: ignore[attr-defined]
from torch.distributed.rpc import RRef

import aiorpc_torch as aiorpc
from aiorpc_torch import remote
from aiorpc_torch.autograd import DistributedOptimizer, context, parameter_rrefs

from ._autograd_steps import (
    KINDS,
    SMALL,
    Net,
    forward,
    our_steps,
    ours_alone,
    raw_alone,
    raw_steps,
    torchs_optimizer,
)
from ._compare import Row, Runs, parse, show, take_turns

TOGETHER = 8


async def main(given: argparse.Namespace) -> list[Row]:
    steps = 20 if given.quick else 200
    # First, since torch's own calls on RRefs get no answer in later worlds of a process (2.15).
    together = await in_one_world(given.repeat, steps)
    return [*await alone(given.repeat, steps), *together]


async def alone(repeat: int, steps: int) -> list[Row]:
    ours, raw = [], []
    for repetition in range(repeat):
        with tempfile.TemporaryDirectory() as scratch:
            for way in (0, 1) if repetition % 2 else (1, 0):
                if way:
                    raw.append(await raw_alone(f"file://{scratch}/meeting", steps))
                else:
                    ours.append(await ours_alone(steps))
    columns = zip(KINDS, zip(*ours, strict=True), zip(*raw, strict=True), strict=True)
    return [Row(kind.what, "µs", Runs(one, other), "≤ 1.15") for kind, one, other in columns]


async def in_one_world(repeat: int, steps: int) -> list[Row]:
    async with aiorpc.local_world(["server"]):
        net = await aiorpc.create("server", Net, SMALL.width, SMALL.layers)
        params = await parameter_rrefs(net)
        opt = await DistributedOptimizer.create(torch.optim.SGD, params, lr=0.001)
        raw_opt = torchs_optimizer(params)
        rows = []
        for kind in KINDS[:3]:
            ours = partial(our_steps, net, kind, opt, steps)
            runs = await take_turns(repeat, ours, partial(raw_steps, net, kind, raw_opt, steps))
            rows.append(Row(f"{kind.what}, in one world", "µs", runs))
        x = SMALL._replace(needs=True).input()
        together = partial(our_backwards, net, x, steps)
        runs = await take_turns(repeat, together, partial(raw_backwards, net, x, steps))
        return [*rows, Row(f"forward and backward, {TOGETHER} at once", "contexts/s", runs)]


async def our_backwards(net: RRef[Net], x: Tensor, steps: int) -> float:
    async def train() -> None:
        for _ in range(steps // TOGETHER):
            async with context() as ctx:
                await ctx.backward([(await remote(net).on_loop(x)).sum()])

    start = perf_counter()
    await asyncio.gather(*(train() for _ in range(TOGETHER)))
    return steps // TOGETHER * TOGETHER / (perf_counter() - start)


def raw_backwards(net: RRef[Net], x: Tensor, steps: int) -> float:
    start = perf_counter()
    for _ in range(steps):
        with torchs.context() as number:
            backward(number, [rpc.rpc_sync("server", forward, args=(net, x)).sum()])
    return steps / (perf_counter() - start)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    show(asyncio.run(main(parse(parser))))
