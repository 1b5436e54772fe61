"""One side of `benchmarks.between_hosts`, in namespaces of its own.

Main: `ours` or `torch`, and the rank, 0 or 1. Rank 0 measures, and prints one line of JSON.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed.rpc as rpc

import aiorpc_torch as aiorpc

INIT = "tcp://10.94.7.1:29511"
BESIDE = 128 << 20  # bytes that travel beside small calls
BUDGET = 256 << 20  # bytes for each size
TICK = 0.001  # seconds

Found = dict[str, list[float]]


def resnet50() -> list[torch.Tensor]:
    """Return tensors of the shapes of ResNet-50's parameters: 161, with 25.6 million elements."""

    def convolution(out: int, into: int, kernel: int) -> list[torch.Size]:
        """Return the shapes of one, and of its normalisation."""
        return [torch.Size(each) for each in ((out, into, kernel, kernel), (out,), (out,))]

    shapes, into = convolution(64, 3, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(width, into, 1) + convolution(width, width, 3)
            shapes += convolution(4 * width, width, 1)
            shapes += convolution(4 * width, into, 1) if block == 0 else []
            into = 4 * width
    return [torch.ones(each) for each in (*shapes, torch.Size((1000, into)), torch.Size((1000,)))]


class Shelf:
    """The callee."""

    async def weigh(self, x: Any) -> int:
        """Return the bytes of a tensor or an array."""
        return x.nbytes  # type: ignore[no-any-return]

    async def echo(self, x: Any) -> Any:
        """Return the argument."""
        return x

    async def count(self, x: list[torch.Tensor]) -> int:
        """Return the number of tensors."""
        return len(x)

    async def cpu(self) -> float:
        """Return the CPU seconds of this process."""
        return time.process_time()


def weigh(x: Any) -> int:
    return x.nbytes  # type: ignore[no-any-return]


def echo(x: Any) -> Any:
    return x


def calls_of(size: int) -> int:
    return max(4, min(64, BUDGET // size))


# ── this library ────────────────────────────────────────────────────────────────────────────────


async def seconds(call: Callable[[], Awaitable[Any]], count: int) -> float:
    """Return the median duration of a call."""
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        await call()
        found.append(time.perf_counter() - begin)
    return median(found)


async def measure(both: Sequence[Any], sizes: Sequence[int], *, is_quick: bool) -> Found:
    shelf, other = both
    found: Found = {}
    for size in sizes:
        x, count = torch.ones(size, dtype=torch.uint8), calls_of(size)
        for what, call in (("one way", shelf.weigh), ("both ways", shelf.echo)):
            await call(x)
            there, here = await shelf.cpu(), time.process_time()
            found[f"{what} {size}"] = [await seconds(partial(call, x), count)]
            spent = await shelf.cpu() - there + time.process_time() - here
            moved = size * count * (1 if what == "one way" else 2)
            found[f"{what} {size} CPU"] = [spent / moved * 1e9]
        array = x.numpy()
        await shelf.weigh(array)
        found[f"array {size}"] = [await seconds(partial(shelf.weigh, array), count)]
    gradients = resnet50()
    for what, call in (("one way", shelf.count), ("both ways", shelf.echo)):
        await call(gradients)
        found[f"gradients {what}"] = [await seconds(partial(call, gradients), 4 if is_quick else 8)]
    found |= await beside(shelf, other, 4 if is_quick else 16)
    return found


async def beside(shelf: Any, other: Any, transfers: int) -> Found:
    """Return the durations of small calls of another object, idle and beside transfers, and lag."""
    x, small = torch.ones(BESIDE, dtype=torch.uint8), torch.ones(15)
    found: Found = {"idle": [], "beside": [], "lag": []}

    async def ping(name: str) -> None:
        while True:
            found[name].append(await seconds(lambda: other.weigh(small), 1))
            await asyncio.sleep(0.002)

    async def tick() -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(TICK)
            found["lag"].append(time.perf_counter() - begin - TICK)

    idle = asyncio.ensure_future(ping("idle"))
    await asyncio.sleep(0.5)
    idle.cancel()
    await shelf.weigh(x)
    tasks = [asyncio.ensure_future(each) for each in (ping("beside"), tick())]
    for _ in range(transfers):
        await shelf.weigh(x)
    for task in tasks:
        task.cancel()
    return found


async def ours(rank: int, sizes: Sequence[int], *, is_quick: bool) -> None:
    async with aiorpc.worker(f"w{rank}", rank=rank, world_size=2, init_method=INIT) as me:
        if rank:
            await me.serve()
        else:
            both = [aiorpc.remote(await aiorpc.create("w1", Shelf)) for _ in range(2)]
            found = await measure(both, sizes, is_quick=is_quick)
            found["sockets"] = [aiorpc.observe.stats().socket_messages]
            print(json.dumps(found))


# ── plain torch ─────────────────────────────────────────────────────────────────────────────────


def duration(call: Callable[[], Any], count: int) -> float:
    """Return the median duration of a call."""
    durations = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        durations.append(time.perf_counter() - begin)
    return median(durations)


def plain(rank: int, sizes: Sequence[int], *, is_quick: bool) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=INIT)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options
    )
    found: Found = {}
    for size in () if rank else sizes:
        x, count = torch.ones(size, dtype=torch.uint8), calls_of(size)
        for what, function in (("one way", weigh), ("both ways", echo)):
            rpc.rpc_sync("w1", function, (x,))
            there, here = rpc.rpc_sync("w1", time.process_time), time.process_time()
            call = partial(rpc.rpc_sync, "w1", function, (x,))
            found[f"{what} {size}"] = [duration(call, count)]
            spent = rpc.rpc_sync("w1", time.process_time) - there + time.process_time() - here
            moved = size * count * (1 if what == "one way" else 2)
            found[f"{what} {size} CPU"] = [spent / moved * 1e9]
        array = x.numpy()
        found[f"array {size}"] = [duration(partial(rpc.rpc_sync, "w1", weigh, (array,)), 4)]
    if not rank:
        gradients = resnet50()
        for what, number in (("one way", len), ("both ways", echo)):
            call = partial(rpc.rpc_sync, "w1", number, (gradients,))
            call()
            found[f"gradients {what}"] = [duration(call, 4 if is_quick else 8)]
        print(json.dumps(found), flush=True)
    rpc.shutdown()


def main(side: str, rank: str, sizes: str, is_quick: str) -> None:
    if side == "ours":
        asyncio.run(ours(int(rank), json.loads(sizes), is_quick=json.loads(is_quick)))
    else:
        plain(int(rank), json.loads(sizes), is_quick=json.loads(is_quick))


if __name__ == "__main__":
    main(*sys.argv[1:])
