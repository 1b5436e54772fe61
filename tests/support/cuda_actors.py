"""What tests call on workers that have a CUDA device, and the mark of such tests."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiorpc_torch import batched, remote

GPU = [
    pytest.mark.gpu,
    pytest.mark.worlds,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(120),
]

HERE = torch.device("cuda:0")
LONG = 500_000_000  # cycles: a quarter of a second, which any race loses
SIZE = 1 << 20


def late(value: float, size: int = SIZE) -> Tensor:
    """A tensor of which each element is `value` once a long kernel has run, and -1 before."""
    found = torch.full((size,), -1.0, device=HERE)
    torch.cuda._sleep(LONG)
    return found.fill_(value)


def on_a_stream(value: float) -> Tensor:
    """The same from a stream of its own, with which the thread's is in order."""
    stream = torch.cuda.Stream(HERE)
    stream.wait_stream(torch.cuda.current_stream(HERE))
    with torch.cuda.stream(stream):
        found = late(value)
    torch.cuda.current_stream(HERE).wait_stream(stream)
    return found


class Actor:
    """Lives beside a device."""

    def __init__(self) -> None:
        self.streams: list[bool] = []
        self.kept: Any = None

    # ── results ─────────────────────────────────────────────────────────────────────────────────

    def make(self, value: float) -> Tensor:
        return late(value)

    async def amake(self, value: float) -> Tensor:
        return late(value)

    async def make_many(self, value: float) -> dict[str, list[Tensor]]:
        return {"some": [late(value), torch.ones(3, device=HERE)]}

    async def items(self, count: int) -> AsyncIterator[Tensor]:
        buffer = torch.empty(SIZE, device=HERE)
        for index in range(count):
            torch.cuda._sleep(LONG // 10)
            yield buffer.fill_(index)

    # ── arguments ───────────────────────────────────────────────────────────────────────────────

    def total(self, tensor: Tensor) -> float:
        return float(tensor.double().sum())

    async def atotal(self, tensor: Tensor) -> Tensor:
        return tensor.double().sum().cpu()

    async def both(self, some: dict[str, Tensor], other: Tensor) -> tuple[Tensor, Tensor]:
        return some["x"] + other, some["x"] - other

    async def where(self, tensor: Tensor) -> str:
        return str(tensor.device)

    async def quick(self) -> str:
        return "here"

    async def ask(self, other: Any, tensor: Tensor) -> Tensor:
        return await remote(other).atotal(tensor * 2)

    # ── batches ─────────────────────────────────────────────────────────────────────────────────

    @batched(max_size=8, stack=True, device="cuda:0")
    def double(self, rows: Tensor, by: Tensor) -> Tensor:
        self.streams.append(self._is_apart())
        return _slowly(rows * by[:, None])

    @batched(max_size=8, stack=True, device="cuda:0")
    async def adouble(self, rows: Tensor) -> dict[str, Tensor]:
        self.streams.append(self._is_apart())
        found = _slowly(rows * 2)
        await asyncio.sleep(0)
        self.streams.append(self._is_apart())
        return {"found": found, "sums": found.sum(1)}

    @batched(max_size=8, stack=True)
    async def there(self, rows: Tensor) -> Tensor:
        return _slowly(rows.to(HERE) * 2)

    @batched(max_size=8, stack=True, device="cuda:0")
    async def fails(self, rows: Tensor) -> Tensor:
        raise LookupError(str(rows.device))

    async def apart(self) -> list[bool]:
        return self.streams

    def _is_apart(self) -> bool:
        return torch.cuda.current_stream(HERE) != torch.cuda.default_stream(HERE)


def _slowly(tensor: Tensor) -> Tensor:
    torch.cuda._sleep(LONG)
    return tensor + 0


class Layer(nn.Module):
    """A part of a model, for distributed autograd."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8).to(HERE)

    async def run(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(LONG // 10)
        found: Tensor = torch.tanh(self.linear(x))
        return found
