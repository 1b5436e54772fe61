"""Children that hang, each in another way."""

import asyncio
import os
import signal
import time
from pathlib import Path

from aiorpc_torch import call

from .two_ends import until


async def block_the_loop(begun: Path) -> None:
    begun.touch()  # noqa: ASYNC240
    time.sleep(600)  # noqa: ASYNC251


def keep_the_gil(begun: Path) -> int:
    begun.touch()
    return sum(range(10**11))


async def pid() -> int:
    return os.getpid()


async def hang(name: str, how: str, begun: Path) -> "asyncio.Task[object] | None":
    """Let a child hang; return the call in which it does."""
    if how == "frozen":
        os.kill(await call(name, pid), signal.SIGSTOP)
        return None
    function = {"its loop is blocked": block_the_loop, "it keeps the GIL": keep_the_gil}[how]
    hanging = asyncio.create_task(call(name, function, begun))
    await until(begun.exists)
    return hanging
