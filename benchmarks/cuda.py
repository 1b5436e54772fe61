"""What do tensors and batches on a CUDA device cost?

Two workers use one device. A tensor goes there and back, compared with raw torch RPC in the same
world and with a plain copy on the device; the peak device memory of either side is shown. A policy
is called by many callers at once, batched and one by one.

    python -m benchmarks.cuda [--quick] [--repeat N] [--device cuda:0]
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import batched, call, create, remote

from ._compare import Row, Runs, parse, repeated, show

CALLEE = "callee"
MB = 1 << 20


class Echo:
    """An object that returns its argument."""

    async def echo(self, tensor: Tensor) -> Tensor:
        return tensor


def echo(tensor: Tensor) -> Tensor:
    """Return the argument, for plain torch."""
    return tensor


def peak(device: str) -> float:
    """Return this process's peak device memory in MB since the last call."""
    found = torch.cuda.max_memory_allocated(device) / MB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return found


def policy_of(*, device: str, size: int) -> Any:
    """Make a policy object whose class batches on that device."""

    class Policy:
        def __init__(self) -> None:
            torch.manual_seed(0)
            layers = nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()
            self.net = nn.Sequential(*layers, nn.Linear(512, 8)).to(device)

        @batched(max_size=size, stack=True, device=device)
        @torch.inference_mode()
        def act(self, states: Tensor) -> Tensor:
            """Return the actions for states [64], sent from the CPU and stacked on the device."""
            return self.net(states).argmax(1)  # type: ignore[no-any-return]

        @torch.inference_mode()
        def act_alone(self, state: Tensor) -> Tensor:
            return self.net(state.to(device)[None]).argmax(1)[0].cpu()  # type: ignore[no-any-return]

    return Policy()


async def main(given: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    async with aiorpc.local_world([CALLEE], device_maps="auto"):
        for size in (1, 16) if given.quick else (1, 16, 256, 1024):
            rows += await echoes(given, size)
        policy = await create(CALLEE, policy_of, device=given.device, size=256)
        for many in (1, 16) if given.quick else (1, 4, 16, 64, 256):
            rows.append(await policies(given, remote(policy), many))
    return rows


async def echoes(given: argparse.Namespace, size: int) -> list[Row]:
    """Measure a tensor of `size` MB there and back, in GB/s of both ways together."""
    tensor = torch.ones(size * MB // 4, device=given.device)
    actor = remote(await create(CALLEE, Echo))
    times = max(3, min(200, (64 if given.quick else 2048) // size))
    peaks: dict[str, list[float]] = {"ours": [], "raw": []}

    async def ours() -> float:
        return await weighed("ours", timed(lambda: actor.echo(tensor), times))

    async def raw() -> float:
        def ask() -> Awaitable[Tensor]:
            return aiorpc.wrap_future(rpc.rpc_async(CALLEE, echo, args=(tensor,)))

        return await weighed("raw", timed(ask, times))

    async def weighed(side: str, rate: Awaitable[float]) -> float:
        await call(CALLEE, peak, given.device)
        found = size * 2 / 1024 * await rate
        peaks[side].append(await call(CALLEE, peak, given.device))
        return found

    async def copies() -> float:
        return size * 2 / 1024 * await timed(partial(copied, tensor), times)

    found = [await repeated(given.repeat, each) for each in (ours, raw, copies)]
    return [
        Row(f"{size} MB there and back", "GB/s", Runs(found[0].ours, found[1].ours)),
        Row(
            f"{size} MB there and back, against two copies",
            "GB/s",
            Runs(found[0].ours, found[2].ours),
        ),
        Row(f"{size} MB: callee's device memory", "MB", Runs(peaks["ours"][1:], peaks["raw"][1:])),
    ]


async def copied(tensor: Tensor) -> Tensor:
    return tensor.clone().clone()


async def timed(step: Callable[[], Awaitable[Tensor]], times: int) -> float:
    """Return steps per second, one after another, until the device has finished."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        found = await step()
    torch.cuda.synchronize(found.device)
    return times / (time.perf_counter() - start)


async def policies(given: argparse.Namespace, policy: Any, many: int) -> Row:
    """Measure calls per second of `many` callers; each calls again when it is answered."""
    state, rounds = torch.randn(64), 10 if given.quick else 100

    async def asking(ask: Callable[[Tensor], Awaitable[Tensor]]) -> float:
        async def caller() -> None:
            for _ in range(rounds):
                await ask(state)

        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(many)))
        return many * rounds / (time.perf_counter() - start)

    found = [
        await repeated(given.repeat, partial(asking, each))
        for each in (policy.act, policy.act_alone)
    ]
    runs = Runs(found[0].ours, found[1].ours)
    return Row(f"a policy, {many} callers: batched, against one by one", "calls/s", runs)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    given = parse(parser)
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: torch finds none")
    show(asyncio.run(main(given)), other="the other way")
    print(torch.cuda.get_device_name(given.device))
