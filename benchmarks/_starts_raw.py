"""Processes of plain torch RPC, for `benchmarks.starts`."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from ._peers_raw import join
from ._starts_work import HOUR, report

Call = Callable[..., object]


class Counter:
    """An object that holds a number."""

    def __init__(self) -> None:
        self.value = 0


def take(x: Tensor) -> float:
    return float(x[0])


class Workers:
    def __init__(self, size: int) -> None:
        self.names = [str(rank) for rank in range(1, size + 1)]

    async def pids(self) -> Sequence[int]:
        return await self._ended([self._send(name, os.getpid) for name in self.names])

    async def create(self, count: int) -> Any:
        names = [self.names[at % len(self.names)] for at in range(count)]
        kept = [rpc.remote(name, Counter) for name in names]
        await self._ended([each._get_future() for each in kept])
        return kept

    async def take(self, x: Tensor) -> Any:
        return await self._ended([self._send(name, take, x) for name in self.names])

    async def wait(self) -> Any:
        return await self._ended([self._send(self.names[-1], time.sleep, HOUR)])

    def _send(self, name: str, function: Call, *args: object) -> "Future[Any]":
        sent: Future[Any] = rpc.rpc_async(name, function, args=args, timeout=0)
        return sent

    async def _ended(self, calls: "list[Future[Any]]") -> list[Any]:
        return await asyncio.to_thread(lambda: [each.wait() for each in calls])


@asynccontextmanager
async def start(size: int) -> AsyncIterator[Workers]:
    with tempfile.TemporaryDirectory() as scratch:
        where = f"file://{scratch}/meeting"
        line = [sys.executable, "-m", __spec__.name, str(size), where]
        others = [
            await asyncio.create_subprocess_exec(*line, str(rank)) for rank in range(1, size + 1)
        ]
        # The number of this process's worlds is a part of its keys in the store.
        rpc._init_counter = 0
        await asyncio.to_thread(join, "0", 0, where, size + 1)
        try:
            yield Workers(size)
        finally:
            await asyncio.to_thread(rpc.shutdown)
            for each in others:
                await each.wait()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        join(sys.argv[3], int(sys.argv[3]), sys.argv[2], int(sys.argv[1]) + 1)
        rpc.shutdown()  # serves until all shut down
    else:
        report(start)
