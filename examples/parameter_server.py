"""A parameter server that makes one step for many trainers: a round of coroutines.

The server has the model and the optimizer. Each trainer computes gradients on images of its own,
sends them and asks for the next step. When all have asked, `_step` runs once, and its one answer,
the new model, goes to all. There is no lock, counter or callback: code on the event loop is not
interrupted, and `@batched(Round(...))` counts the members. The rounds wait `--timeout` seconds for
a killed trainer, until its replacement process has joined.

    python -m examples.parameter_server --trainers 3 --iterations 60
"""

import argparse
import asyncio
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from anyio import to_thread
from rich.progress import Progress
from torch import Tensor, nn

import aiorpc_torch as aiorpc
from aiorpc_torch import Broadcast, Round, RoundTimeout, RRef, Worker, batched, remote

from ._classifier import (
    Learned,
    Mean,
    Sample,
    accuracy,
    add_training,
    adopt,
    advance,
    batches,
    learn,
    new_model,
    new_optimizer,
    on_cpu,
)
from ._launch import add_world, launch
from ._plot import curves

PS = "ps"


class State(NamedTuple):
    """The model after `steps` steps: parameters and buffers by name."""

    steps: int
    model: dict[str, Tensor]


class ParameterServer:
    """A parameter server. Its methods run on the event loop, interrupted only at an await."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = new_model(options).to(options.server_device)
        self.optimizer = new_optimizer(self.model, options)
        self.answer = on_cpu(self.model)
        self.mean, self.iterations = Mean(), options.iterations
        self.losses: list[float] = []
        self.news: asyncio.Queue[list[int]] = asyncio.Queue()  # the members of each step
        whole = Round(options.trainers, options.quorum, options.timeout, member=lambda rank: rank)
        self.step = batched(whole)(self._step)

    async def state(self) -> State:
        """Return the current model, for a trainer that joins."""
        return State(len(self.losses), self.answer)

    async def add(self, samples: int, learned: Learned) -> None:
        """Add a part of a trainer's results, weighed with its samples."""
        # Not in the round, which would hold every trainer's gradient until the last has come.
        self.mean.add(learned, samples)

    async def _step(self, ranks: list[int]) -> Broadcast[State]:
        if len(self.losses) < self.iterations:  # else a late trainer asks for the model alone
            # Results that come while the thread computes belong to the next mean.
            loss, self.answer = await to_thread.run_sync(self._advance, self.mean.take())
            self.losses.append(loss)
            self.news.put_nowait(ranks)
        return Broadcast(await self.state())

    def _advance(self, means: Learned) -> tuple[float, dict[str, Tensor]]:
        return advance(self.model, self.optimizer, means), on_cpu(self.model)


@functools.cache
def ready() -> "asyncio.Future[RRef[ParameterServer]]":
    """Return the future of this process's server."""
    return asyncio.get_running_loop().create_future()


async def parameter_server() -> RRef[ParameterServer]:
    """Return the server's RRef; trainers call this in the server's process."""
    return await asyncio.shield(ready())  # the call of a killed trainer is cancelled


async def train(me: Worker, options: argparse.Namespace) -> None:
    """Train from the current model to the last step."""
    ps = remote(await aiorpc.call(PS, parameter_server))
    model = new_model(options).to(options.device)
    data = batches(options, me.rank - 1, options.trainers)
    state, batch = await ps.state(), next(data)
    print(f"{me.name}, process {os.getpid()}, begins at step {state.steps}", flush=True)
    while state.steps < options.iterations:
        adopt(model, state.model, options)
        sent = await compute(model, batch, options, ps)
        try:
            # Calls start in the order in which they were made, so the last part is added before the
            # step. Meanwhile the next batch is made.
            *_, state, batch = await asyncio.gather(
                *sent, ps.step(me.rank), to_thread.run_sync(next, data)
            )
        except RoundTimeout:  # fewer than a quorum
            state = await ps.state()


async def compute(
    model: nn.Module, batch: Sample, options: argparse.Namespace, ps: Any
) -> list[asyncio.Future[None]]:
    """Learn from a batch; each part of the results is sent while the rest is computed."""
    loop = asyncio.get_running_loop()
    sent: list[asyncio.Future[None]] = []

    def send(part: Learned) -> None:
        sent.append(asyncio.ensure_future(ps.add(len(batch[0]), part)))

    def tell(part: Learned) -> None:
        loop.call_soon_threadsafe(send, part)

    # Not asyncio's to_thread, which alternates threads: each keeps memory for what it computes.
    await to_thread.run_sync(learn, model, batch, options, tell)
    return sent


async def serve(options: argparse.Namespace) -> None:
    """Serve until the last step; print and draw the losses."""
    ps = ParameterServer(options)
    ready().set_result(RRef(ps))
    with Progress() as progress:
        task = progress.add_task("training", total=options.iterations)
        for step in range(options.iterations):
            ranks = await ps.news.get()
            if missing := {*range(1, options.trainers + 1)} - {*ranks}:
                progress.console.print(f"step {step}: without {', '.join(map(name_of, missing))}")
            progress.update(task, advance=1, description=f"loss {ps.losses[step]:.3f}")
    print(f"loss, first step: {ps.losses[0]:.3f}, last of {step + 1}: {ps.losses[-1]:.3f}")
    right = await to_thread.run_sync(accuracy, ps.model, options)
    print(f"accuracy on held-out images: {right:.1%}")
    title = f"{options.model}, {options.trainers} trainers and a parameter server"
    lines = {"mean of a round": ps.losses}
    where = curves(options.plot, lines, title=title, xlabel="step", ylabel="cross-entropy")
    print(f"loss curve: {where}", flush=True)


async def main(me: Worker, options: argparse.Namespace) -> None:
    """Serve on rank 0, train on the others."""
    await (serve(options) if me.rank == 0 else train(me, options))


def name_of(rank: int) -> str:
    return f"trainer{rank}" if rank else PS


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_training(parser)
    group = parser.add_argument_group("rounds")
    group.add_argument("--trainers", type=int, help="trainers (default: the world size less one)")
    group.add_argument(
        "--quorum", type=int, default=1, help="trainers that suffice after --timeout"
    )
    group.add_argument(
        "--timeout", type=float, default=10.0, help="seconds until a quorum suffices"
    )
    group.add_argument("--server-device", default="cpu", help="device of the optimizer's step")
    group.add_argument("--restart", type=int, default=3, help="restarts of trainers, at most")
    parser.add_argument("--plot", type=Path, default=Path("out/parameter_server.png"))
    parser.add_argument("--quick", action="store_true", help="a small model, a few seconds")
    add_world(parser, int(os.environ.get("WORLD_SIZE", 4)))
    if "--quick" in (sys.argv if given is None else given):
        parser.set_defaults(**QUICK)
    options = parser.parse_args(given)
    if options.trainers is None:
        options.trainers = options.world_size - 1
    if not 1 <= options.trainers <= options.images:
        parser.error(f"{options.trainers} trainers cannot share {options.images} images")
    if not 1 <= options.quorum <= options.trainers:
        parser.error(f"a quorum is 1 to {options.trainers} trainers, not {options.quorum}")
    return options


QUICK = {
    "model": "small",
    "classes": 10,
    "images": 2000,
    "iterations": 20,
    "timeout": 2.0,
    "world_size": 3,
}


if __name__ == "__main__":
    options = arguments()
    names = [name_of(rank) for rank in range(options.trainers + 1)]
    launch(main, names, options, restart=options.restart, on_failure="continue")
