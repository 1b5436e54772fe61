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


class Shelf:
    """The callee."""

    async def weigh(self, x: torch.Tensor) -> int:
        """Return the bytes of a tensor."""
        return x.nbytes

    async def echo(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return x

    async def cpu(self) -> float:
        """Return the CPU seconds of this process."""
        return time.process_time()


def weigh(x: torch.Tensor) -> int:
    return x.nbytes


def echo(x: torch.Tensor) -> torch.Tensor:
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
            found["sockets"] = [aiorpc.stats().socket_messages]
            print(json.dumps(found))


# ── plain torch ─────────────────────────────────────────────────────────────────────────────────


def plain(rank: int, sizes: Sequence[int]) -> None:
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
            durations = []
            for _ in range(count):
                begin = time.perf_counter()
                rpc.rpc_sync("w1", function, (x,))
                durations.append(time.perf_counter() - begin)
            found[f"{what} {size}"] = [median(durations)]
            spent = rpc.rpc_sync("w1", time.process_time) - there + time.process_time() - here
            moved = size * count * (1 if what == "one way" else 2)
            found[f"{what} {size} CPU"] = [spent / moved * 1e9]
    if not rank:
        print(json.dumps(found), flush=True)
    rpc.shutdown()


def main(side: str, rank: str, sizes: str, is_quick: str) -> None:
    if side == "ours":
        asyncio.run(ours(int(rank), json.loads(sizes), is_quick=json.loads(is_quick)))
    else:
        plain(int(rank), json.loads(sizes))


if __name__ == "__main__":
    main(*sys.argv[1:])
