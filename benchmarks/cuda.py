"""What do tensors and batches on a CUDA device cost?

Two workers use one device. All ways of a row alternate, after more messages than torch has streams
to receive on. Raw torch calls a `def` with a WorkerInfo and no timeout; ours, one of an object.
Throughput lets the device queue; latency waits for it after each echo. NCCL is not compared, since
it needs a GPU for each process.

    python -m benchmarks.cuda [--quick] [--repeat N] [--device cuda:0]

AIORPC_TORCH_CHANNELS in the environment chooses the channels of all ways. `--device cpu` tries the
program itself. The rows of CartPole need gymnasium.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import batched, call, create, remote
from aiorpc_torch._torch.agent import CHANNELS

from ._compare import Row, Runs, parse, settle, show

CALLEE = "callee"
MIB = 1 << 20
WARM = 40  # calls before anything is measured, more than torch has streams

Way = Callable[[], Awaitable[float]]


async def in_turn(repeat: int, ways: Sequence[Way]) -> list[list[float]]:
    """Measure all ways `repeat` times, each time in another order; the first time warms up."""
    found: list[list[float]] = [[] for _ in ways]
    for repetition in range(repeat + 1):
        for offset in range(len(ways)):
            index = (repetition + offset) % len(ways)
            settle()
            found[index].append(await ways[index]())
    return [runs[1:] for runs in found]


async def rate(step: Callable[[], Awaitable[Any]], times: int, *, wait: bool = False) -> float:
    """Return steps per second; with `wait` the device finishes each before the next."""
    finish()
    start = time.perf_counter()
    for _ in range(times):
        await step()
        if wait:
            finish()
    finish()
    return times / (time.perf_counter() - start)


def finish() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ── at the callee ───────────────────────────────────────────────────────────────────────────────


class Echo:
    """An object that returns its argument."""

    def echo(self, tensor: Tensor) -> Tensor:
        return tensor


def echo(tensor: Tensor) -> Tensor:
    """Return the argument, for plain torch."""
    return tensor


def peak(device: str) -> float:
    """Return this process's peak device memory in MiB since the last call."""
    found = torch.cuda.max_memory_allocated(device) / MIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return found


class Weights:
    """A parameter server: weights on the device, and a step for each gradient."""

    def __init__(self, size: int, device: str) -> None:
        self.weights = torch.ones(size, device=device)

    def update(self, gradient: Tensor) -> Tensor:
        return self.weights.add_(gradient, alpha=-0.01)


raw_weights: list[Weights] = []


def raw_update(gradient: Tensor) -> Tensor:
    """Do the same for plain torch, whose calls have streams in no order with each other."""
    if not raw_weights:
        raw_weights.append(Weights(gradient.numel(), str(gradient.device)))
    if not gradient.is_cuda:
        return raw_weights[0].update(gradient)
    own, common = torch.cuda.current_stream(), torch.cuda.default_stream(gradient.device)
    common.wait_stream(own)
    with torch.cuda.stream(common):
        gradient.record_stream(common)
        found = raw_weights[0].update(gradient)
    own.wait_stream(common)
    return found


class Net(nn.Sequential):
    """A policy's network."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()
        super().__init__(*layers, nn.Linear(512, 8))
        self.to(device)


def policy_of(*, device: str, size: int) -> Any:
    """Make a policy object whose class batches on that device."""

    class Policy:
        def __init__(self) -> None:
            self.net = Net(device)

        def __reduce__(self) -> Any:  # with device maps, torch pickles what an RRef is made of
            return object, ()

        @batched(max_size=size, stack=True, device=device)
        @torch.inference_mode()
        def act(self, states: Tensor) -> Tensor:
            """Return the actions for states [64], sent from the CPU and stacked on the device."""
            return self.net(states).argmax(1)  # type: ignore[no-any-return]

        @torch.inference_mode()
        def act_alone(self, state: Tensor) -> Tensor:
            return self.net(state.to(device)[None]).argmax(1)[0].cpu()  # type: ignore[no-any-return]

    return Policy()


# ── the rows ────────────────────────────────────────────────────────────────────────────────────


async def main(given: argparse.Namespace) -> list[Row]:
    maps: Literal["auto"] | None = None if given.device == "cpu" else "auto"
    rows: list[Row] = []
    async with aiorpc.local_world([CALLEE], device_maps=maps):
        callee = rpc.get_worker_info(CALLEE)
        rows.append(await lone_calls(given, callee))
        for size in (1, 16) if given.quick else (1, 16, 256, 1024):
            rows += await echoes(given, callee, size)
        rows.append(await steps(given, callee))
        policy = await create(CALLEE, policy_of, device=given.device, size=256)
        for many in (1, 16) if given.quick else (1, 16, 64, 256):
            rows.append(await policies(given, remote(policy), many))
    return rows


def ask_raw(callee: Any, function: Callable[..., Any], *args: Any) -> Callable[[], Awaitable[Any]]:
    """Return a step of plain torch, which blocks the loop: torch's own callers have none."""

    async def step() -> Any:
        return rpc.rpc_async(callee, function, args=args, timeout=0).wait()

    return step


async def lone_calls(given: argparse.Namespace, callee: Any) -> Row:
    """Measure calls with a small argument on the device, one after another."""
    tensor, actor = torch.ones(256, device=given.device), remote(await create(CALLEE, Echo))
    raw, times = ask_raw(callee, echo, tensor), 50 if given.quick else 500
    firsts = [1e3 / await rate(lambda: actor.echo(tensor), 1, wait=True) for _ in range(2)]
    print(f"a fresh world's first call: {firsts[0]:.1f} ms, the second: {firsts[1]:.1f} ms")
    for step in (lambda: actor.echo(tensor), raw):
        await rate(step, WARM)
    found = await in_turn(
        given.repeat,
        [partial(rate, step, times, wait=True) for step in (lambda: actor.echo(tensor), raw)],
    )
    runs = Runs(*([1e6 / each for each in runs] for runs in found))
    return Row("a lone call, 1 KiB on the device there and back", "µs", runs)


async def echoes(given: argparse.Namespace, callee: Any, size: int) -> list[Row]:
    """Measure a tensor of `size` MiB there and back, in GiB/s of both ways together."""
    tensor = torch.ones(size * MIB // 4, device=given.device)
    actor = remote(await create(CALLEE, Echo))
    times = max(3, min(200, (64 if given.quick else 2048) // size))

    async def copies() -> Tensor:
        return tensor.clone().clone()

    steps = [lambda: actor.echo(tensor), ask_raw(callee, echo, tensor), copies]
    for step in steps:
        await rate(step, WARM if size <= 256 else 3)  # each stream has memory of its own
    ways = [partial(rate, step, times, wait=wait) for wait in (False, True) for step in steps]
    rates = await in_turn(given.repeat, ways)
    scaled = [[size * 2 / 1024 * each for each in runs] for runs in rates]
    what = f"{size} MiB there and back"
    rows = [
        Row(f"{what}, throughput", "GiB/s", Runs(scaled[0], scaled[1])),
        Row(f"{what}, throughput, against two copies", "GiB/s", Runs(scaled[0], scaled[2])),
        Row(f"{what}, latency", "GiB/s", Runs(scaled[3], scaled[4])),
        Row(f"{what}, latency, against two copies", "GiB/s", Runs(scaled[3], scaled[5])),
    ]
    return rows if given.device == "cpu" else [*rows, await memory(given, size, times, *steps[:2])]


async def memory(
    given: argparse.Namespace, size: int, times: int, *steps: Callable[[], Awaitable[Any]]
) -> Row:
    """Measure the callee's peak memory, apart from the times."""

    async def weighed(step: Callable[[], Awaitable[Any]]) -> float:
        await call(CALLEE, peak, given.device)
        await rate(step, times)
        return await call(CALLEE, peak, given.device)

    found = await in_turn(given.repeat, [partial(weighed, step) for step in steps])
    return Row(f"{size} MiB: callee's peak device memory", "MiB", Runs(found[0], found[1]))


async def steps(given: argparse.Namespace, callee: Any) -> Row:
    """Measure steps of a trainer whose server has the weights on the device."""
    size = (1 if given.quick else 16) * MIB // 4
    server = remote(await create(CALLEE, Weights, size, given.device))
    gradient = torch.full((size,), 0.5, device=given.device)

    async def ours() -> None:
        nonlocal gradient
        gradient = (await server.update(gradient)) * 0.5

    async def raw() -> None:
        nonlocal gradient
        gradient = (await ask_raw(callee, raw_update, gradient)()) * 0.5

    for step in (ours, raw):
        await rate(step, WARM)
    times = 20 if given.quick else 200
    found = await in_turn(given.repeat, [partial(rate, ours, times), partial(rate, raw, times)])
    what = f"a parameter server, {size * 4 // MIB} MiB of weights on the device"
    return Row(what, "steps/s", Runs(found[0], found[1]))


async def policies(given: argparse.Namespace, policy: Any, many: int) -> Row:
    """Measure calls per second of `many` callers; each calls again when it is answered."""
    # Not more calls in all for more callers: one by one, 256 callers of 100 rounds take a minute.
    state, rounds = torch.randn(64), 10 if given.quick else max(10, 3200 // many)

    async def asking(ask: Callable[[Tensor], Awaitable[Tensor]]) -> float:
        async def caller() -> None:
            for _ in range(rounds):
                await ask(state)

        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(many)))
        return many * rounds / (time.perf_counter() - start)

    ways = [partial(asking, policy.act), partial(asking, policy.act_alone)]
    found = await in_turn(given.repeat, ways)
    what = f"a policy, {many} caller{'s' * (many > 1)}: batched, against one by one"
    return Row(what, "calls/s", Runs(found[0], found[1]))


def cartpole(given: argparse.Namespace) -> list[Row]:
    """Measure CartPole with the agent's network on the device, in processes of its own."""
    try:
        from . import _cartpole_ours as ours
        from ._cartpole_work import Sizes
        from .cartpole import measure_side
    except ImportError as exc:
        print(f"CartPole is left out: {exc}")
        return []
    rows = []
    for observers in (1, 2) if given.quick else (1, 5, 10):
        sizes = Sizes(observers, 1, 40 if given.quick else 500, device=given.device)
        found = [measure_side(ours, sizes) for _ in range(given.repeat)]
        runs = Runs(*([each[name] for each in found] for name in ("batched", "unbatched")))
        what = f"CartPole, {observers} observer{'s' * (observers > 1)}: batched, against one by one"
        rows.append(Row(what, "steps/s", runs))
    return rows


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    given = parse(parser)
    if given.device != "cpu" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: torch finds none")
    show([*asyncio.run(main(given)), *cartpole(given)], other="the other way")
    if given.device != "cpu":
        print(torch.cuda.get_device_name(given.device))
    print(f"channels: {os.environ.get(CHANNELS) or 'chosen by TensorPipe: CUDA IPC if possible'}")
