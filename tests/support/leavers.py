"""Workers of a world of `worker()`, in processes of their own, which are told when to go on."""

import asyncio
import logging
import os
from multiprocessing.connection import Connection
from typing import Any

import aiorpc_torch as aiorpc
from aiorpc_torch._node import departures


def double(x: int) -> int:
    return 2 * x


def server(
    pipe: Connection, name: str, rank: int, options: dict[str, Any], block: str, until: str | None
) -> None:
    """Leave at once, or serve; tell which peers the log names, and the end."""
    departures.LOG_INTERVAL = 0.1
    handler = logging.Handler()
    handler.emit = lambda record: pipe.send(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("aiorpc_torch")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    async def main() -> None:
        async with aiorpc.worker(name, rank=rank, **options) as me:
            if block == "serve":
                await me.serve(until)
                pipe.send("served")

    try:
        asyncio.run(main())
        pipe.send("left")
    except BaseException as exc:
        pipe.send(f"{type(exc).__name__}: {exc}")


def client(pipe: Connection, name: str, rank: int, options: dict[str, Any]) -> None:
    """Call the server when told "call", die at "die", raise at "raise", leave at "leave"."""

    async def main() -> None:
        async with aiorpc.worker(name, rank=rank, **options):
            while (command := await asyncio.to_thread(pipe.recv)) != "leave":
                if command == "die":
                    os._exit(1)
                if command == "raise":
                    raise RuntimeError("on purpose")
                pipe.send(await aiorpc.call("server", double, 4))

    try:
        asyncio.run(main())
        pipe.send("left")
    except BaseException as exc:
        pipe.send(f"{type(exc).__name__}: {exc}")
