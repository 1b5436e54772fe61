"""Processes of plain torch RPC, for `benchmarks.starts`."""

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
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


_ended = threading.Event()


def end() -> None:
    """Let the process that runs this end."""
    _ended.set()


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

    async def end(self) -> None:
        """Let all end that live; an answer may be cut off."""
        for each in [self._send(name, end) for name in self.names]:
            with contextlib.suppress(RuntimeError):
                await asyncio.to_thread(each.wait)

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
        # In this process's second world torch would go on counting, and meet no peer: the numbers
        # are parts of keys in the store, and of the names of barriers.
        rpc._init_counter = 0
        rpc.api._all_gather_sequence_id.clear()
        await asyncio.to_thread(join, "0", 0, where, size + 1)
        workers = Workers(size)
        try:
            yield workers
        finally:
            await workers.end()
            rpc.shutdown(graceful=False)  # a graceful one counts in C++ what is not to be reset
            for each in others:
                await each.wait()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        join(sys.argv[3], int(sys.argv[3]), sys.argv[2], int(sys.argv[1]) + 1)
        _ended.wait()
        rpc.shutdown(graceful=False)
    else:
        report(start)
