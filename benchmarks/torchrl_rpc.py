"""Are TorchRL's programs for torch RPC quicker once they attach?

Two of them, with processes and an `init_rpc` of their own: a trainer that samples from a replay
buffer in another process (TorchRL's `benchmark_sample_latency_over_rpc.py`, a group without
`world_size`), and an `RPCCollector` with two collecting nodes. On the same objects, TorchRL's call
and the awaited one take turns. Needs the extra `peers`.

    python -m benchmarks.torchrl_rpc [--quick] [--repeat N]
"""

import argparse
import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc

import aiorpc_torch as aiorpc

from ._compare import Row, parse, show, take_turns
from ._torchrl_nodes import Buffer, collect, hold_buffer, options

collectors: Any = import_module("torchrl.collectors")
distributed: Any = import_module("torchrl.collectors.distributed")
envs: Any = import_module("torchrl.envs")
modules: Any = import_module("tensordict.nn")

PIXELS = 3 * 86 * 86  # floats of an observation, as in TorchRL's benchmark
SAMPLED = 256  # transitions of a call
CALLS = 10  # of a repetition
NODES = 2  # that collect
FRAMES = 400  # of a batch, of all nodes together


@contextmanager
def processes(target: Callable[..., None], *arguments: tuple[object, ...]) -> Iterator[None]:
    """Run a process of `target` for each tuple of arguments; wait for their ends."""
    context = mp.get_context("spawn")
    started = [context.Process(target=target, args=each) for each in arguments]
    for each in started:
        each.start()
    yield
    for each in started:
        each.join()


# ── a replay buffer in another process ──────────────────────────────────────────────────────────


async def replay(given: argparse.Namespace) -> Row:
    """Compare the seconds of a sample, which the trainer reads."""
    calls = 2 if given.quick else CALLS
    async with aiorpc.attach() as me:
        if "buffer" not in me.peers:
            async for change in me.changes():
                if change.name == "buffer":
                    break
        buffer = rpc.remote("buffer", Buffer, args=(PIXELS,))

        def raw() -> float:
            begin = time.perf_counter()
            for _ in range(calls):
                read(rpc.rpc_sync(buffer.owner(), Buffer.sample, args=(buffer, SAMPLED)))
            return 1e3 * (time.perf_counter() - begin) / calls

        async def ours() -> float:
            begin = time.perf_counter()
            for _ in range(calls):
                read(await aiorpc.remote(buffer).sample(SAMPLED))
            return 1e3 * (time.perf_counter() - begin) / calls

        runs = await take_turns(given.repeat, ours, raw)
    size = 2 * 4 * PIXELS * SAMPLED / 1e6
    return Row(f"a sample of {SAMPLED} transitions, {size:.0f} MB", "ms", runs)


def read(sample: Any) -> None:
    for key in ("observation", "next_observation"):
        sample[key] + 1


# ── a collector of several nodes ────────────────────────────────────────────────────────────────


def make_environment() -> Any:
    return envs.GymEnv("CartPole-v1")


def make_collector(port: int) -> Any:
    layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2), nn.Softmax(-1))
    return distributed.RPCCollector(
        [make_environment] * NODES,
        modules.TensorDictModule(layers, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=FRAMES,
        total_frames=1 << 40,
        sync=True,
        launcher="submitit_delayed",  # the nodes run already
        tcp_port=port,
        collector_class=collectors.Collector,
    )


async def batches(given: argparse.Namespace, collector: Any) -> Row:
    """Compare the seconds of a batch: the nodes' steps, and their way to the trainer."""
    theirs = iter(collector)
    async with aiorpc.attach():
        nodes = [aiorpc.remote(each) for each in collector.collector_rrefs]

        def raw() -> float:
            begin = time.perf_counter()
            next(theirs)
            return 1e3 * (time.perf_counter() - begin)

        async def ours() -> float:
            begin = time.perf_counter()
            torch.cat(await asyncio.gather(*(node.next() for node in nodes)))
            return 1e3 * (time.perf_counter() - begin)

        runs = await take_turns(given.repeat, ours, raw)
    return Row(f"{FRAMES} frames of {NODES} nodes", "ms", runs)


# ── both ────────────────────────────────────────────────────────────────────────────────────────


def run_replay(given: argparse.Namespace) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/store"
        with processes(hold_buffer, (init_method,)):
            rpc.init_rpc("trainer", rank=0, rpc_backend_options=options(init_method))  # type: ignore[no-untyped-call]
            row = asyncio.run(replay(given))
            rpc.shutdown(graceful=False)
    return row


def run_collector(given: argparse.Namespace) -> Row:
    with socket.create_server(("localhost", 0)) as free:
        port = int(free.getsockname()[1])
    with processes(collect, *((rank + 1, NODES + 1, port) for rank in range(NODES))):
        collector = make_collector(port)
        row = asyncio.run(batches(given, collector))
        collector.shutdown()
    return row


def main(given: argparse.Namespace) -> None:
    """Run each program in a process of its own: torch's groups last as long as theirs."""
    rows = []
    for run in (run_replay, run_collector):
        with ProcessPoolExecutor(1, mp.get_context("spawn")) as process:
            rows.append(process.submit(run, given).result())
    show(rows, ours="awaited", other="TorchRL's call")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(parse(argparse.ArgumentParser(description=__doc__)))
