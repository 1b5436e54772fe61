"""Up to which size should a tensor travel on our own connection, and from where otherwise?

By torch RPC a tensor is not copied, but its cost is the same at any size. In shared memory it is
copied once. On the connection it is copied at both ends. All ways are the library's own, there and
back. The benchmark moves the library's threshold (`tensors.INLINE_BYTES`) in both processes, and
the bound of a frame with it.

    python -m benchmarks.threshold [--quick] [--repeat N] [--plot PATH]
"""

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from operator import truediv
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.distributed.rpc import RRef

import aiorpc_torch as aiorpc
from aiorpc_torch import call, create, remote
from aiorpc_torch._aio import segments
from aiorpc_torch._wire import tensors

from ._compare import Row, Runs, arguments, number, settle, show
from ._plot import OURS, RAW, Curve, Panel, draw

SIZES = [2**power for power in range(10, 21)]  # bytes: 1 KiB to 1 MiB
SHOWN = [2**10, 2**15, 2**17, 2**20]  # of them, in the table
NEVER, ALWAYS = 0, 1 << 30  # thresholds
FRAME = 8 << 20  # bytes of a frame at most; the library's own bound is below a tensor of 1 MiB
IN_FLIGHT = 64
NOW = tensors.INLINE_BYTES

Way = Callable[[RRef["Server"], Tensor], Awaitable[float]]
"""A function that times calls with a tensor, in µs for each."""


class Server:
    async def echo(self, x: Tensor) -> Tensor:
        return x


async def main(given: argparse.Namespace) -> tuple[list[Row], list[Panel]]:
    sizes = SIZES[::5] if given.quick else SIZES
    calls = 20 if given.quick else 200
    async with aiorpc.local_world(["server"]):
        server = await create("server", Server)
        alone = await sweep(given.repeat, server, partial(lone, calls), sizes)
        many = await sweep(given.repeat, server, partial(in_flight, max(3, calls // 20)), sizes)
    rows = [*table("lone call", sizes, alone), *table(f"{IN_FLIGHT} in flight", sizes, many)]
    return rows, [
        panel("A lone call", sizes, alone),
        panel(f"{IN_FLIGHT} calls in flight", sizes, many),
    ]


# ── the two ways ────────────────────────────────────────────────────────────────────────────────


async def sweep(repeat: int, server: RRef[Server], way: Way, sizes: Sequence[int]) -> list[Runs]:
    return [await both(repeat, server, way, torch.rand(size // 4)) for size in sizes]


async def both(repeat: int, server: RRef[Server], way: Way, x: Tensor) -> Runs:
    """Measure on the connection and by torch RPC, alternately."""
    found: dict[int, list[float]] = {ALWAYS: [], NEVER: []}
    for repetition in range(repeat + 1):
        for threshold in (NEVER, ALWAYS) if repetition % 2 else (ALWAYS, NEVER):
            await call("server", inline_up_to, threshold)
            await inline_up_to(threshold)
            await remote(server).echo(x)  # from its result on, later calls use the new threshold
            settle()
            found[threshold].append(await way(server, x))
    return Runs(found[ALWAYS][1:], found[NEVER][1:])  # the first repetition warms up


async def inline_up_to(size: int) -> None:
    """Set the threshold of the process that runs this, in all modules that have imported it."""
    for name, value in (("INLINE_BYTES", size), ("MAX_FRAME", FRAME)):
        for module in [*sys.modules.values()]:
            if module.__name__.startswith("aiorpc_torch.") and name in vars(module):
                setattr(module, name, value)


async def lone(calls: int, server: RRef[Server], x: Tensor) -> float:
    times = []
    for _ in range(min(calls, budget(x))):
        start = perf_counter()
        await remote(server).echo(x)
        times.append(perf_counter() - start)
    return median(times) * 1e6


async def in_flight(calls: int, server: RRef[Server], x: Tensor) -> float:
    each = min(calls, max(3, budget(x) // IN_FLIGHT))

    async def again_and_again() -> None:
        for _ in range(each):
            await remote(server).echo(x)

    start = perf_counter()
    await asyncio.gather(*(again_and_again() for _ in range(IN_FLIGHT)))
    return (perf_counter() - start) / (each * IN_FLIGHT) * 1e6


def budget(x: Tensor) -> int:
    """Return the number of calls that carry 256 MB one way, the bound for large tensors."""
    return (1 << 28) // x.nbytes


# ── output ──────────────────────────────────────────────────────────────────────────────────────


def table(what: str, sizes: Sequence[int], runs: Sequence[Runs]) -> list[Row]:
    return [
        Row(f"{what}, {size:,} bytes", "µs", each)
        for size, each in zip(sizes, runs, strict=True)
        if size in SHOWN
    ]


def panel(title: str, sizes: Sequence[int], runs: Sequence[Runs]) -> Panel:
    xs = [float(size) for size in sizes]
    curves = [
        Curve("on the connection", OURS, xs, [each.ours for each in runs]),
        Curve("by torch RPC", RAW, xs, [each.raw for each in runs]),
    ]
    mark = (float(NOW), f"threshold: {NOW:,} bytes")
    return Panel(title, "size of the tensor, bytes", "µs a call", curves, log="xy", mark=mark)


def crossing(panel: Panel) -> float | None:
    """Return the size from which on torch RPC is quicker, between two measured sizes."""
    inline, by_torch = panel.curves
    sizes = inline.xs
    ratios = [median(map(truediv, *runs)) for runs in zip(inline.runs, by_torch.runs, strict=True)]
    for at in range(len(sizes) - 1, 0, -1):
        low, high = math.log(ratios[at - 1]), math.log(ratios[at])
        if low <= 0.0 < high:
            step: float = (sizes[at] / sizes[at - 1]) ** (low / (low - high))
            return sizes[at - 1] * step
    return None


def say_crossing(panel: Panel) -> None:
    size = crossing(panel)
    where = "no crossing" if size is None else f"torch RPC is quicker from {number(size)} bytes on"
    print(f"{panel.title}: {where}")


if __name__ == "__main__":
    given = arguments("The size up to which a tensor should travel on the connection.")
    os.environ[segments.SWITCH] = "0"
    rows, drawn = asyncio.run(main(given))
    show(rows, ours="connection", other="torch RPC")
    print()
    os.environ.pop(segments.SWITCH)
    shared, _ = asyncio.run(main(given))
    show(shared, ours="connection", other="shared memory")
    print()
    for each in drawn:
        say_crossing(each)
    draw(drawn, given.plot)
