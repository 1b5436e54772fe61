"""The client process of `benchmarks.peers`: one measurement of one system.

A system's module has `new_event_loop`, which makes the loop of its client. Its `start(scratch)` is
a context manager that runs the server and returns a `Peer`.
"""

import asyncio
import importlib
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

from ._compare import freeze, settle
from ._peers_process import end_with_parent
from ._peers_work import QUICK, Peer, Sizes, workloads

Figures = dict[str, float | None]


def take_turn(parent: Connection, module: str, sizes: Sizes, scratch: str) -> None:
    """Start the system of that module, measure it and stop it.

    Send its figures to the parent or, in one line, why there are none.
    """
    end_with_parent()
    try:
        system = importlib.import_module(f".{module}", __package__)
        with asyncio.Runner(loop_factory=system.new_event_loop) as runner:
            figures = runner.run(_measure(system, sizes, Path(scratch)))
        parent.send(figures)
    except Exception as exc:
        traceback.print_exc()
        parent.send(traceback.format_exception_only(exc)[-1].strip())


async def _measure(system: ModuleType, sizes: Sizes, scratch: Path) -> Figures:
    async with system.start(scratch) as peer:
        rows = workloads(sizes)
        return {row.method: await _measured(peer, row.method, sizes) for row in rows}


async def _measured(peer: Peer, method: str, sizes: Sizes) -> float | None:
    if peer.only and method not in peer.only:
        return None
    workload = getattr(peer, method)
    await workload(QUICK)  # warms up
    (settle if peer.freezes else freeze)()
    figure: float | None = await workload(sizes)
    return figure
