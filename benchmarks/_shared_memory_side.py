"""One side of `benchmarks.shared_memory`, in processes of its own: prints its figures as JSON.

    python -m benchmarks._shared_memory_side SIDE REPEAT SIZES MEMBERS ARGUMENT

SIDE is `ours`, `torch` (plain torch RPC over its default transports) or `uv` (plain torch RPC over
that). SIZES and MEMBERS are lists of bytes and of workers, ARGUMENT the bytes of the group's.
"""

import asyncio
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import call, create, remote

WARM_UP = 5  # calls that are not counted: segments and channels are made by the first ones

Figures = dict[str, list[float]]
"""The seconds of a call, and the page faults of it at both ends, by what it was."""


def echo(x: Tensor) -> Tensor:
    return x


def take(x: Tensor) -> int:
    return len(x)


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak() -> int:
    """Return the highest resident bytes so far, shared pages included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Server:
    async def echo(self, x: Tensor) -> Tensor:
        return x

    async def take(self, x: Tensor) -> int:
        return len(x)


# ── ours ────────────────────────────────────────────────────────────────────────────────────────


async def ours(repeat: int, sizes: Sequence[int], members: Sequence[int], argument: int) -> Figures:
    found: Figures = {}
    if sizes:
        found |= await there_and_back(repeat, sizes)
    for count in members:
        names = [f"w{number}" for number in range(count)]
        async with aiorpc.local_world(names):
            group, x, times = await create(names, Server), torch.rand(argument // 4), []
            for _ in range(WARM_UP + repeat):
                start = perf_counter()
                await remote(group).take(x)
                times.append(perf_counter() - start)
            found[f"group {count}"], times = times[WARM_UP:], []
            for _ in range(WARM_UP + repeat):
                start = perf_counter()
                await asyncio.gather(*(remote(member).take(x) for member in group))
                times.append(perf_counter() - start)
            found[f"calls {count}"] = times[WARM_UP:]
    return found


async def there_and_back(repeat: int, sizes: Sequence[int]) -> Figures:
    found: Figures = {}
    async with aiorpc.local_world(["w0"]):
        (server,) = await create(["w0"], Server)
        for size in sizes:
            x, times = torch.rand(size // 4), []
            before = 0
            for number in range(WARM_UP + repeat):
                if number == WARM_UP:
                    before = faults() + await call("w0", faults)
                start = perf_counter()
                await remote(server).echo(x)
                times.append(perf_counter() - start)
            found[f"echo {size}"] = times[WARM_UP:]
            after = faults() + await call("w0", faults)
            found[f"faults {size}"] = [(after - before) / repeat]
        found["peak"] = [peak(), await call("w0", peak)]
    return found


# ── plain torch ─────────────────────────────────────────────────────────────────────────────────


init_rpc: Any = rpc.init_rpc  # without annotations in torch


def options(side: str, path: str) -> rpc.TensorPipeRpcBackendOptions:
    transports = ["uv"] if side == "uv" else None
    return rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{path}", _transports=transports, num_worker_threads=16
    )


def serve(side: str, path: str, rank: int, count: int) -> None:
    torch.set_num_threads(1)
    name, given = f"w{rank - 1}", options(side, path)
    init_rpc(name, rank=rank, world_size=count + 1, rpc_backend_options=given)
    rpc.shutdown()


def with_torch(side: str, count: int, measure: Callable[[Figures], None], found: Figures) -> None:
    """Measure in a world of torch's own with `count` other processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        spawn = multiprocessing.get_context("spawn")
        others = [
            spawn.Process(target=serve, args=(side, path, rank, count))
            for rank in range(1, count + 1)
        ]
        for each in others:
            each.start()
        init_rpc("main", rank=0, world_size=count + 1, rpc_backend_options=options(side, path))
        measure(found)
        rpc.shutdown()
        for each in others:
            each.join()


def raw(
    side: str, repeat: int, sizes: Sequence[int], members: Sequence[int], argument: int
) -> Figures:
    def there_and_back(found: Figures) -> None:
        for size in sizes:
            x, times, before = torch.rand(size // 4), [], 0
            for number in range(WARM_UP + repeat):
                if number == WARM_UP:
                    before = faults() + rpc.rpc_sync("w0", faults)
                start = perf_counter()
                rpc.rpc_sync("w0", echo, args=(x,))
                times.append(perf_counter() - start)
            found[f"echo {size}"] = times[WARM_UP:]
            found[f"faults {size}"] = [(faults() + rpc.rpc_sync("w0", faults) - before) / repeat]
        found["peak"] = [peak(), rpc.rpc_sync("w0", peak)]

    def to_all(found: Figures) -> None:
        x, times = torch.rand(argument // 4), []
        for _ in range(WARM_UP + repeat):
            start = perf_counter()
            futures = [rpc.rpc_async(f"w{n}", take, args=(x,)) for n in range(count)]
            torch.futures.wait_all(futures)
            times.append(perf_counter() - start)
        found[f"group {count}"] = times[WARM_UP:]

    found: Figures = {}
    if sizes:
        with_torch(side, 1, there_and_back, found)
    for count in members:  # one at most: torch's second world in a process is not like the first
        with_torch(side, count, to_all, found)
    return found


def main(side: str, *given: str) -> None:
    torch.set_num_threads(1)
    repeat, sizes, members, argument = map(json.loads, given)
    arguments: tuple[Any, ...] = repeat, sizes, members, argument
    found = asyncio.run(ours(*arguments)) if side == "ours" else raw(side, *arguments)
    print(json.dumps({key: [median(values), *values] for key, values in found.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
