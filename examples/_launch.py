"""Start of a program: in a world on this machine, under torchrun, or with a terminal per worker.

This module has no code of the workers' work.
"""

import argparse
import asyncio
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

import aiorpc_torch as aiorpc

T = TypeVar("T")

OnFailure = Literal["continue", "stop"]
Main = Callable[[aiorpc.Worker, argparse.Namespace], Awaitable[T]]


def add_world(parser: argparse.ArgumentParser, world_size: int | None = None) -> None:
    """Add the options for the rank of this process and the address of its world.

    Args:
        parser: Parser of the program's command line.
        world_size: Default number of workers, if the command line may choose it.
    """
    group = parser.add_argument_group(
        "world", "By default all workers run on this machine. Under torchrun, give none of these."
    )
    group.add_argument("--rank", type=int, help="rank of this worker, if each is started by itself")
    if world_size is not None:
        group.add_argument("--world-size", type=int, default=world_size, help="number of workers")
    group.add_argument("--master-addr", default="127.0.0.1", help="address of rank 0")
    group.add_argument("--master-port", type=int, default=29500)


def launch(
    main: Main[T],
    names: Sequence[str],
    options: argparse.Namespace,
    *,
    restart: int = 0,
    on_failure: OnFailure = "stop",
) -> T:
    """Run `main(me, options)` in every worker; return the result of this process's.

    Args:
        main: An `async def` at the top level of a module.
        names: Names of the workers, by rank.
        options: Command line, with the options of `add_world`.
        restart: Number of restarts of dead workers in a local world, in all.
        on_failure: Effect of one worker's failure on the others.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if options.rank is None and "RANK" not in os.environ:
            return aiorpc.run_local(
                main, names, args=(options,), restart=restart, on_failure=on_failure
            )
        return asyncio.run(_join(main, names, options, on_failure))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # every worker has left; unloading torch would take another second


async def _join(
    main: Main[T], names: Sequence[str], options: argparse.Namespace, on_failure: OnFailure
) -> T:
    rank = options.rank
    where: str | None = f"tcp://{options.master_addr}:{options.master_port}"
    if rank is None:  # torchrun sets it
        rank, where = int(os.environ["RANK"]), None
        if (size := int(os.environ["WORLD_SIZE"])) != len(names):
            sys.exit(f"this world has {len(names)} workers, and torchrun starts {size}")
    if not 0 <= rank < len(names):
        sys.exit(f"--rank is one of 0 to {len(names) - 1}, not {rank}")
    async with aiorpc.worker(
        names[rank],
        rank=rank,
        world_size=len(names),
        init_method=where,
        stop_timeout=math.inf,  # serve until every `main` is done, as in a local world
        on_failure=on_failure,
    ) as me:
        return await main(me, options)


# ── serving workers ─────────────────────────────────────────────────────────────────────────────

_ended = asyncio.Event()


def end() -> None:
    """End the program: the workers that serve this one may return."""
    _ended.set()


async def serve(leader: str) -> None:
    """Wait until the worker `leader` ends the program.

    A `main` that has returned does not notice a lost worker, so it calls this first.

    Raises:
        WorkerLost: if it ends in another way.
    """
    await aiorpc.call(leader, _ended_here)


async def _ended_here() -> None:
    await _ended.wait()
