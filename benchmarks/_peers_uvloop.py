"""aiorpc_torch under uvloop on both sides, for `benchmarks.peers`.

A child of a local world runs on asyncio's own loop. So the server is a process that runs `worker()`
on a loop of its choice.
"""

import asyncio
import importlib
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiorpc_torch as aiorpc

from ._peers_ours import Ours, Server
from ._peers_process import process
from ._peers_work import Peer

uvloop: Any = importlib.import_module("uvloop")
new_event_loop = uvloop.new_event_loop


@asynccontextmanager
async def start(scratch: Path) -> AsyncIterator[Peer]:
    where = f"file://{scratch}/meeting"
    with process(serve, where):
        async with aiorpc.worker("client", rank=0, world_size=2, init_method=where):
            yield Ours(await aiorpc.create("server", Server))


def serve(_: Connection, where: str) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(where))


async def _serve(where: str) -> None:
    async with aiorpc.worker(
        "server",
        rank=1,
        world_size=2,
        init_method=where,
        stop_timeout=math.inf,  # serve until the client leaves too
        on_failure="stop",
    ):
        pass
