"""What does the parameter server of the examples cost beside its plain-torch form?

A trainer computes, and then waits until it has the next model: its gradient travels and is added,
the other trainers finish, the step is made, and the model travels. That wait is measured for each
trainer and each step, and the peak memory of the server's process. Ours sends while it computes,
which slows computing where cores are few. So the table shows both, and the time from one step to
the next. The plain form is the tutorial's pattern in its strongest form
(`examples/_reference/parameter_server.py`), with the same model, images, optimizer and threads.

    python -m benchmarks.parameter_server [--quick] [--repeat N] [--trainers N ...]
"""

import argparse
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from torch.multiprocessing.spawn import spawn

import aiorpc_torch as aiorpc
from examples import parameter_server as ours
from examples._reference import parameter_server as plain

from ._compare import Row, Runs, parse, show
from ._peers_process import end_with_parent, process

LIMIT = 300.0
"""Seconds for one measurement of one side."""

TRANSPORTS = ["uv"]
"""Transports of both sides, the better ones for both with more workers than cores.

Over shared memory each worker spins for messages while others compute. Tensors go from memory to
memory over either.
"""

WARM = 2  # warm-up steps, which are not counted


def main(given: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for trainers in given.trainers:
        sides: tuple[list[Figures], list[Figures]] = [], []
        for repetition in range(given.repeat):
            # The second one finds a warmer machine, so the order alternates too.
            for side in (0, 1) if repetition % 2 == 0 else (1, 0):
                sides[side].append(measure((run_ours, run_plain)[side], trainers, given.quick))
        rows += compared(trainers, *sides)
    return rows


Figures = dict[str, float]


def compared(trainers: int, mine: list[Figures], theirs: list[Figures]) -> list[Row]:
    def runs(what: str) -> Runs:
        return Runs([each[what] for each in mine], [each[what] for each in theirs])

    who = f"{trainers} trainer{'s' if trainers > 1 else ''}"
    return [
        Row(f"{who}: outside compute", "s a step", runs("outside"), "≤ 1.0"),
        Row(f"{who}: compute", "s a step", runs("compute")),
        Row(f"{who}: both, from step to step", "s a step", runs("step")),
        Row(f"{who}: most memory of the server", "MB", runs("peak"), "≤ 1.0"),
        Row(f"{who}: of that, since it had only imported", "MB", runs("grown")),
    ]


def measure(side: Callable[..., None], trainers: int, quick: bool) -> Figures:
    # Few images a batch: the trainers' computing is not measured, and takes cores from the
    # measured part.
    words = ["--trainers", str(trainers), "--iterations", "10", "--batch", "2"]
    words += ["--model", "resnet18"] if quick else []
    with tempfile.TemporaryDirectory(prefix="parameter-server-") as scratch:
        with process(take_turn, side, words, scratch) as child:
            if not child.poll(LIMIT):
                raise TimeoutError(f"no figures in {LIMIT:.0f} s")
            child.recv()
        return figures(Path(scratch), trainers)


def take_turn(parent: Connection, side: Callable[..., None], words: list[str], at: str) -> None:
    end_with_parent()
    side(words, at)
    parent.send(None)


def figures(scratch: Path, trainers: int) -> Figures:
    """Return the medians of all trainers' steps, and the server's memory."""
    compute, outside, step = [], [], []
    for rank in range(1, trainers + 1):
        spans = json.loads((scratch / str(rank)).read_text())
        compute += [end - start for start, end in spans[WARM:]]
        outside += [after[0] - before[1] for before, after in pairwise(spans[WARM:])]
        step += [after[0] - before[0] for before, after in pairwise(spans[WARM:])]
    peak, before = json.loads((scratch / "0").read_text())
    times = {"compute": median(compute), "outside": median(outside), "step": median(step)}
    return {**times, "peak": peak, "grown": peak - before}


# ── in the processes of a side ──────────────────────────────────────────────────────────────────


def run_ours(words: list[str], scratch: str) -> None:
    options = plain.arguments(words)
    options.quorum, options.timeout, options.device, options.via = 1, 60.0, "cpu", "cpu"
    names = ["ps", *(f"trainer{rank + 1}" for rank in range(options.trainers))]
    aiorpc.run_local(
        worker_of_ours,
        names,
        args=(options, scratch),
        transports=TRANSPORTS,
        start_timeout=LIMIT,
    )


async def worker_of_ours(
    me: aiorpc.types.Worker, options: argparse.Namespace, scratch: str
) -> None:
    spans = timed(ours, "ParameterServer")
    await ours.main(me, options)
    write(scratch, me.rank, spans)


def run_plain(words: list[str], scratch: str) -> None:
    options = plain.arguments(words)
    nprocs = options.trainers + 1
    spawn(  # type: ignore[no-untyped-call]
        worker_of_plain, (options, scratch), nprocs=nprocs
    )


def worker_of_plain(rank: int, options: argparse.Namespace, scratch: str) -> None:
    spans = timed(plain, "serve")
    plain.run(rank, options, f"{scratch}/store", TRANSPORTS)
    write(scratch, rank, spans)


idle: list[float] = []  # MB of the server, before it has a model


def timed(program: ModuleType, server: str) -> list[tuple[float, float]]:
    """Make the program record when each of its computations began and ended.

    `server` names the function or the class that makes the model.
    """
    spans: list[tuple[float, float]] = []
    learn = program.learn

    @functools.wraps(learn)
    def clocked(*args: Any) -> Any:
        start = time.perf_counter()
        learned = learn(*args)
        spans.append((start, time.perf_counter()))
        return learned

    program.learn = clocked  # type: ignore[attr-defined]
    serve = getattr(program, server)

    def weighed(*args: Any) -> Any:
        idle.append(memory("VmRSS"))
        return serve(*args)

    setattr(program, server, weighed)
    program.accuracy = lambda *_: 0.0  # type: ignore[attr-defined]  # not what is measured
    return spans


def write(scratch: str, rank: int, spans: list[tuple[float, float]]) -> None:
    found: Any = spans if rank else (memory("VmHWM"), idle[0])
    (Path(scratch) / str(rank)).write_text(json.dumps(found))


def memory(what: str) -> float:
    """Return MB of this process, now (`VmRSS`) or at its peak (`VmHWM`)."""
    # Not `getrusage`, which starts from the peak of the process that forked this one.
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[what].split()[0]) / 1024


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="A parameter server beside its plain-torch form.")
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 3, 5], metavar="N")
    show(main(parse(parser)), other="plain torch")
