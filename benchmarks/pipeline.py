"""How long does a step through a pipeline take, by the number of microbatches?

One model, cut in two: as coroutines (`examples.pipeline`), in plain torch RPC
(`examples._reference.pipeline`), and uncut in one process. In each repetition every way has
processes of its own, one way after the other. Two stages need two cores. The master takes a part of
these, and so does plain torch's polling of shared memory on one machine.

    python -m benchmarks.pipeline [--quick] [--repeat N] [--stages N] [--plot PATH]
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from torch.distributed import rpc
from torch.multiprocessing.spawn import spawn

import aiorpc_torch as aiorpc
from examples import pipeline as ours
from examples._reference import pipeline as plain
from examples._textures import Shape, Textures, batches

from ._compare import Row, Runs, freeze, parse, settle, show
from ._peers_process import process
from ._plot import OTHER, OURS, RAW, Curve, Panel, draw
from ._uncut import Uncut

MICRO = [1, 2, 4, 8]
BATCH = 64
SHAPE = Shape(width=32)
LR = 0.1
LIMIT = 300.0  # seconds for one measurement of one way

Times = dict[int, float]  # milliseconds a step, by number of microbatches
Taken = defaultdict[int, list[float]]  # seconds of each step


# ── in the process that trains ──────────────────────────────────────────────────────────────────


def measure_way(parent: Connection, way: str, stages: int, steps: int) -> None:
    """Measure one way, with its workers."""
    os.setpgid(0, 0)  # so that the parent can end all processes of the group
    threading.Thread(target=_end_with_parent, daemon=True).start()
    workers = [f"stage{number}" for number in range(stages)]
    parent.send(WAYS[way](workers, steps))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def as_coroutines(workers: list[str], steps: int) -> Times:
    return asyncio.run(_as_coroutines(workers, steps))


async def _as_coroutines(workers: list[str], steps: int) -> Times:
    async with aiorpc.local_world(workers):
        pipeline = await ours.Pipeline.create(workers, SHAPE, LR)
        taken: Taken = defaultdict(list)
        for batch, micro in _schedule(steps):
            start = time.perf_counter()
            await pipeline.step(batch, micro)
            taken[micro].append(time.perf_counter() - start)
        return _milliseconds(taken)


def in_plain_torch(workers: list[str], steps: int) -> Times:
    names = ["master", *workers]
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/meeting"
        children = spawn(  # type: ignore[no-untyped-call]
            plain.serve, args=(names, where), nprocs=len(workers), join=False
        )
        plain.join(0, names, where)
        pipeline = plain.Pipeline(workers, SHAPE, LR)
        times = _times(pipeline.step, steps)
        del pipeline
        rpc.shutdown()
        children.join()
        return times


def uncut(_: list[str], steps: int) -> Times:
    return _times(Uncut(SHAPE, LR).step, steps)


def _times(step: Callable[[Textures, int], float], steps: int) -> Times:
    freeze()
    taken: Taken = defaultdict(list)
    for batch, micro in _schedule(steps):
        start = time.perf_counter()
        step(batch, micro)
        taken[micro].append(time.perf_counter() - start)
    return _milliseconds(taken)


def _schedule(steps: int) -> list[tuple[Textures, int]]:
    """Interleave the numbers of microbatches, so that a slow phase affects all of them."""
    settle()
    return [(batch, micro) for batch in batches(2 + steps, BATCH, seed=0) for micro in MICRO]


def _milliseconds(taken: Taken) -> Times:
    return {micro: median(each[2:]) * 1e3 for micro, each in taken.items()}  # the first two warm up


WAYS: dict[str, Callable[[list[str], int], Times]] = {
    "coroutines": as_coroutines,
    "plain torch": in_plain_torch,
    "uncut": uncut,
}


# ── in the process that compares ────────────────────────────────────────────────────────────────


def measured(way: str, stages: int, steps: int) -> Times:
    with process(measure_way, way, stages, steps) as trainer:
        if not trainer.poll(LIMIT):
            sys.exit(f"{way}: no figures in {LIMIT:.0f} s")
        times: Times = trainer.recv()
        return times


def main(given: argparse.Namespace) -> None:
    steps = 2 if given.quick else 8
    found: dict[str, list[Times]] = {way: [] for way in WAYS}
    for repetition in range(given.repeat):
        # The second one finds a warmer machine, so the order alternates too.
        for way in WAYS if repetition % 2 == 0 else reversed(WAYS):
            print(f"repetition {repetition + 1} of {given.repeat}: {way}", file=sys.stderr)
            found[way].append(measured(way, given.stages, steps))
    each = {way: partial(_column, times) for way, times in found.items()}
    rows = [
        Row(
            f"{name} {micro}",
            "ms a step",
            Runs(each["coroutines"](micro), each[other](micro)),
        )
        for other, name in (("plain torch", "microbatches:"), ("uncut", "against uncut:"))
        for micro in MICRO
    ]
    show(rows[: len(MICRO)], other="plain torch")
    print()
    show(rows[len(MICRO) :], other="uncut")
    looks = dict(zip(WAYS, (OURS, RAW, OTHER), strict=True))
    curves = [Curve(way, looks[way], MICRO, [each[way](micro) for micro in MICRO]) for way in WAYS]
    title = f"A step of {BATCH} images through {given.stages} stages"
    draw([Panel(title, "microbatches", "milliseconds", curves)], given.plot)


def _column(times: list[Times], micro: int) -> list[float]:
    return [each[micro] for each in times]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A pipeline as coroutines and in plain torch.")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a figure: .svg or .png")
    main(parse(parser))
