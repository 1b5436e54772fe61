"""How a program starts: in a world on this machine, under torchrun, or one terminal a worker.

Knows nothing of what the workers do.
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
    """Let the command line say which worker of which world this process is.

    Args:
        parser: of the program's command line.
        world_size: how many workers there are by default, if that may be chosen.
    """
    group = parser.add_argument_group(
        "world", "By default all workers run on this machine. Under torchrun, give none of these."
    )
    group.add_argument("--rank", type=int, help="this worker's, if each is started by itself")
    if world_size is not None:
        group.add_argument("--world-size", type=int, default=world_size, help="how many workers")
    group.add_argument("--master-addr", default="127.0.0.1", help="where rank 0 is reached")
    group.add_argument("--master-port", type=int, default=29500)


def launch(
    main: Main[T],
    names: Sequence[str],
    options: argparse.Namespace,
    *,
    restart: int = 0,
    on_failure: OnFailure = "stop",
) -> T:
    """Run `main(me, options)` in every worker; what this process's returned.

    Args:
        main: an `async def` at the top of a module.
        names: of the workers, by rank.
        options: the command line, with what `add_world` adds.
        restart: how many times altogether a worker that died is started again, in a local world.
        on_failure: what the failure of one worker means for the others.
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
        os._exit(130)  # every worker has left; to unload torch would take another second


async def _join(
    main: Main[T], names: Sequence[str], options: argparse.Namespace, on_failure: OnFailure
) -> T:
    rank = options.rank
    where: str | None = f"tcp://{options.master_addr}:{options.master_port}"
    if rank is None:  # torchrun has said it
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
        stop_timeout=math.inf,  # whose `main` is done serves until all are, as in a local world
        on_failure=on_failure,
    ) as me:
        return await main(me, options)


# ── who only serves ─────────────────────────────────────────────────────────────────────────────

_ended = asyncio.Event()


def end() -> None:
    """This worker's part is done, and so is that of those who serve it."""
    _ended.set()


async def serve(leader: str) -> None:
    """Return when that worker ends the program: a `main` that has returned minds no loss.

    Raises:
        WorkerLost: if it ends otherwise.
    """
    await aiorpc.call(leader, _ended_here)


async def _ended_here() -> None:
    await _ended.wait()
