"""An actor that keeps tensors, in this process or on workers in others."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiorpc_torch import call
from aiorpc_torch._carrier import shared_memory

from .segment_files import mapped_segments, open_segments


class TensorShelf:
    """Keeps tensors, and tells of them."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    async def echo(self, x: Any) -> Any:
        """The argument."""
        return x

    async def keep(self, x: Any) -> int:
        """Keep the argument."""
        self.kept.append(x)
        return len(self.kept)

    async def grow(self, x: Tensor) -> float:
        """Add the number of kept tensors to each element, and keep it."""
        x.add_(len(self.kept))
        self.kept.append(x)
        return float(x.sum())

    async def sums(self) -> list[float]:
        """Those of the kept tensors."""
        return [float(each.sum()) for each in self.kept]

    async def drop(self) -> None:
        """Keep none."""
        self.kept.clear()

    async def give(self, worker: str, size: int, count: int) -> int:
        """Call another worker with large tensors."""
        for number in range(count):
            await call(worker, count_elements, torch.full((size,), float(number)))
        return count

    async def last(self, size: int) -> Tensor:
        """The result of a process that is killed once it has sent it."""
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGKILL)
        return torch.ones(size)

    async def weigh(self, x: Tensor, entered: Path, may_end: Path) -> float:
        """The sum of a tensor, once a file is there. Until then each call is noted in another."""
        with entered.open("a") as file:
            file.write("entered\n")
        while not may_end.exists():  # noqa: ASYNC110, ASYNC240 - another process makes it
            await asyncio.sleep(0.01)
        return float(x.sum())

    async def items(self, size: int, count: int) -> AsyncIterator[Tensor]:
        """Tensors."""
        for number in range(count):
            yield torch.full((size,), float(number))

    async def stop_copying(self) -> None:
        """Let no later copy into a segment end that is made in a thread."""
        shared_memory.memory_threads = lambda job: None  # type: ignore[assignment]

    def pid(self) -> int:
        """This process's."""
        return os.getpid()


def count_elements(x: Tensor) -> int:
    """How many it has."""
    return len(x)


def memory_files() -> tuple[int, int]:
    """Descriptors and mappings of segments in this process."""
    return open_segments(), mapped_segments()
