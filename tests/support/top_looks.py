"""Looks at running workers, as `top` takes them."""

import asyncio
import contextlib
import os
from collections.abc import Callable

import pytest

from aiorpc_torch.__main__ import main as command_line  # noqa: F401
from aiorpc_torch._top import terminal
from aiorpc_torch._top.model import History, Row
from aiorpc_torch._top.probe import Prober
from aiorpc_torch._top.verdicts import Verdict, verdicts

SOON = 60.0  # seconds after which something will never happen


async def rows_until(*are_there: Callable[[Row], bool]) -> list[Row]:
    """Look again and again until there is each such row among those of this world."""
    history = History()
    with contextlib.closing(Prober()) as prober:
        async with asyncio.timeout(SOON):
            while True:
                history.add(await asyncio.to_thread(prober.sample))
                rows = history.rows(os.getpid())
                if all(any(map(is_there, rows)) for is_there in are_there):
                    return rows
                await asyncio.sleep(0.05)


async def verdict_of(kind: str, worker: str) -> Verdict:
    """Look at the world of this process until there is such a verdict of a worker with a method.

    A busy machine may hold others too.
    """
    history = History()
    with contextlib.closing(Prober()) as prober:
        async with asyncio.timeout(SOON):
            while True:
                history.add(await asyncio.to_thread(prober.sample))
                for each in verdicts(history, history.rows(os.getpid())):
                    if (each.kind, each.worker) == (kind, worker) and each.method:
                        return each
                await asyncio.sleep(0.2)


async def look_at(pid: int) -> list[Row]:
    """Return the rows that one picture of `top` has of a world."""
    rows, _ = await asyncio.to_thread(terminal.look, pid)
    return rows


def look_once(patch: pytest.MonkeyPatch) -> None:
    """Let `top` look once before it prints."""
    patch.setattr(terminal, "LOOKS", 1)
