"""Start of a program: all its workers on this machine, or one of them under torchrun."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from aiorpc_torch import run_local, worker

Main = Callable[..., Awaitable[Any]]


def run(main: Main, names: Sequence[str], *args: Any, restart: int = 0, stop: bool = True) -> Any:
    """Run `main(me, *args)` in every worker; return the result of this process's.

    Args:
        main: An `async def` at the top level of a module.
        names: Names of the workers, by rank. torchrun must start as many processes.
        args: Further arguments of `main`.
        restart: Number of restarts of dead workers in a local world, in all.
        stop: Whether the failure of one worker ends the others.
    """
    on_failure: Literal["stop", "continue"] = "stop" if stop else "continue"
    if "RANK" not in os.environ:
        return run_local(main, names, args=args, restart=restart, on_failure=on_failure)
    if int(os.environ["WORLD_SIZE"]) != len(names):
        raise SystemExit(f"torchrun must start {len(names)} processes: {', '.join(names)}")

    async def join() -> Any:
        async with worker(names[int(os.environ["RANK"])], on_failure=on_failure) as me:
            return await main(me, *args)

    return asyncio.run(join())
