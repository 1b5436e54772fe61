"""What tests call on workers that have a CUDA device, and how such tests run.

Needs pytest and torch alone. With AIORPC_TEST_DEVICE=cpu they are rehearsed without a device: it
shows that they run, and nothing about an order.
"""

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from aiorpc_torch import RRef, batched, create, remote, testing
from aiorpc_torch._torch.staging import PAUSE
from aiorpc_torch.types import Worker
from tests.gpu.left_out import PARTS

REHEARSED = os.environ.get("AIORPC_TEST_DEVICE") == "cpu"
HAS_DEVICE = torch.cuda.is_available() and not REHEARSED

GPU = [
    pytest.mark.gpu,
    pytest.mark.worlds,
    pytest.mark.skipif(not (HAS_DEVICE or REHEARSED), reason="needs a CUDA device"),
    pytest.mark.timeout(60),
]

# For tests, or lists of tests, that cannot be rehearsed.
needs_device = pytest.mark.skipif(not HAS_DEVICE, reason="needs a CUDA device")

HERE = torch.device("cpu" if REHEARSED else "cuda:0")
LONG = 500_000_000  # cycles: a quarter of a second, which any race loses
SIZE = 1 << 20

Test = TypeVar("Test", bound=Callable[..., Any])


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that is a coroutine, run to its end without a plugin; it leaves nothing behind."""

    async def run(*args: Any, **kwargs: Any) -> None:
        async with testing.no_leaks():
            await test(*args, **kwargs)

    @functools.wraps(test)
    def plain(*args: Any, **kwargs: Any) -> None:
        asyncio.run(run(*args, **kwargs))

    return plain


NEEDS: dict[str, str] = {}
"""For each test, the part of the synchronization without which it fails."""


def fails_without(part: str) -> Callable[[Test], Test]:
    """Note the part; `test_left_out.py` tries that the test fails if the part is left out."""
    assert part in PARTS

    def note(test: Test) -> Test:
        NEEDS[f"{test.__module__.rpartition('.')[2]}.py::{test.__name__}"] = part
        return test

    return note


def gpu_world(workers: Sequence[str] = (), **options: Any) -> AbstractAsyncContextManager[Worker]:
    """A world with maps between all devices, unless `options` says otherwise."""
    # Children leave out a part from their start on, if it is left out here.
    options = {"preload": ("tests.gpu.left_out",), **options}
    return testing.world(workers, **{"device_maps": "auto", **options})


async def warm_actor(worker: str = "a") -> tuple[Any, "RRef[Actor]"]:
    """An actor, after tensors have gone each way: by torch RPC and, small ones, through the host.

    The first one may synchronize the device, and so hide what later ones lack.
    """
    rref = await create(worker, Actor)
    actor: Any = remote(rref)
    for size in (SIZE, 1):
        await actor.where(torch.ones(size, device=HERE))
        await actor.ones(size)
    return actor, rref


def sleep(cycles: int) -> None:
    """Keep the device busy, on the current stream of this thread."""
    if HERE.type == "cuda":
        torch.cuda._sleep(cycles)


def late(value: float, size: int = SIZE) -> Tensor:
    """A tensor of which each element is `value` once a long kernel has run, and -1 before."""
    found = torch.full((size,), -1.0, device=HERE)
    sleep(LONG)
    return found.fill_(value)


def on_a_stream(value: float) -> Tensor:
    """The same from a stream of its own, with which the thread's is in order."""
    if HERE.type == "cpu":
        return late(value)
    stream = torch.cuda.Stream(HERE)
    stream.wait_stream(torch.cuda.current_stream(HERE))
    with torch.cuda.stream(stream):
        found = late(value)
    torch.cuda.current_stream(HERE).wait_stream(stream)
    return found


def settle() -> None:
    """Wait for the device, and until the host would wait for it again."""
    if HERE.type == "cuda":
        torch.cuda.synchronize(HERE)
    time.sleep(2 * PAUSE)


def is_default_stream() -> bool:
    if HERE.type == "cpu":
        return True
    return torch.cuda.current_stream(HERE) == torch.cuda.default_stream(HERE)


class Actor:
    """Lives beside a device."""

    def __init__(self) -> None:
        self.streams: list[Any] = []
        self.kept: Any = None
        self.sums: list[Tensor] = []
        self.weights = torch.zeros(SIZE, device=HERE)

    # ── results ─────────────────────────────────────────────────────────────────────────────────

    async def ones(self, size: int) -> Tensor:
        return torch.ones(size, device=HERE)

    def make(self, value: float, size: int = SIZE) -> Tensor:
        return late(value, size)

    async def amake(self, value: float, size: int = SIZE) -> Tensor:
        return late(value, size)

    async def make_many(self, value: float) -> dict[str, list[Tensor]]:
        return {"some": [late(value), torch.ones(3, device=HERE)]}

    async def items(self, count: int) -> AsyncIterator[Tensor]:
        buffer = torch.empty(SIZE, device=HERE)
        for index in range(count):
            sleep(LONG // 10)
            yield buffer.fill_(index)

    def small_items(self, count: int) -> Iterator[Tensor]:
        buffer = torch.empty(3, device=HERE)
        for index in range(count):
            yield buffer.fill_(index)

    async def make_and_ask(self, other: Any, value: float) -> Tensor:
        """A result while a call that was made here has no answer yet."""
        self.kept = asyncio.create_task(remote(other).quick())
        await asyncio.sleep(0)
        sleep(3 * LONG)
        return late(value)

    # ── arguments ───────────────────────────────────────────────────────────────────────────────

    def total(self, tensor: Tensor) -> float:
        return float(tensor.double().sum())

    async def atotal(self, tensor: Tensor) -> Tensor:
        return tensor.double().sum().cpu()

    async def both(self, some: dict[str, Tensor], other: Tensor) -> tuple[Tensor, Tensor]:
        return some["x"] + other, some["x"] - other

    async def where(self, *tensors: Tensor) -> list[str]:
        return [str(tensor.device) for tensor in tensors]

    async def describe(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [(str(each.device), tuple(each.shape), float(each.sum())) for each in tensors]

    async def give_back(self, tensors: Any) -> Any:
        return tensors

    def give_back_twice(self, tensor: Tensor) -> tuple[bool, Tensor]:
        """The argument plus one, from a thread, and whether it was on this worker's device."""
        return tensor.device == HERE, tensor + 1

    async def quick(self) -> str:
        return "here"

    async def ask(self, other: Any, tensor: Tensor) -> Tensor:
        await remote(other).where(tensor.clone())  # the first one may synchronize the device
        return await remote(other).atotal(tensor * 2)

    async def settle(self) -> None:
        settle()

    # ── state ───────────────────────────────────────────────────────────────────────────────────

    def add(self, tensor: Tensor) -> bool:
        self.weights += tensor
        return is_default_stream()

    async def aadd(self, tensor: Tensor) -> bool:
        self.weights += tensor
        return is_default_stream()

    async def state(self) -> Tensor:
        return self.weights

    async def be_busy(self) -> None:
        sleep(4 * LONG)

    async def note(self, tensor: Tensor) -> None:
        self.sums.append(tensor.double().sum())

    async def noted(self) -> list[float]:
        """The sums since the last time."""
        found, self.sums = [float(each) for each in self.sums], []
        return found

    # ── batches ─────────────────────────────────────────────────────────────────────────────────

    @batched(max_size=8, stack=True, device=str(HERE))
    def double(self, rows: Tensor, by: Tensor) -> Tensor:
        self._note_stream()
        return _slowly(rows * by[:, None])

    @batched(max_size=8, stack=True, device=str(HERE))
    async def adouble(self, rows: Tensor) -> dict[str, Tensor]:
        self._note_stream()
        found = _slowly(rows * 2)
        await asyncio.sleep(0)
        self._note_stream()
        return {"found": found, "sums": found.sum(1)}

    @batched(max_size=8, stack=True, device=str(HERE))
    def unroll(self, rows: Tensor) -> Iterator[Tensor]:
        for factor in range(3):
            self._note_stream()
            yield _slowly(rows * factor)

    @batched(max_size=8, stack=True, device=str(HERE))
    async def aunroll(self, rows: Tensor) -> AsyncIterator[Tensor]:
        for factor in range(3):
            self._note_stream()
            yield _slowly(rows * factor)
            await asyncio.sleep(0)

    @batched(max_size=8)
    def each_plus_one(self, rows: list[Tensor]) -> list[Tensor]:
        return [row + 1 for row in rows]

    @batched(max_size=8, stack=True)
    async def there(self, rows: Tensor) -> Tensor:
        return _slowly(rows.to(HERE) * 2)

    @batched(max_size=8, stack=True, device=str(HERE))
    async def fails(self, rows: Tensor) -> Tensor:
        raise LookupError(str(rows.device))

    @batched(max_size=8, stack=True, device=str(HERE))
    async def plus_mean_of(self, rows: Tensor, others: Tensor) -> Tensor:
        """Rows plus the mean of what another worker makes."""
        made = await remote(self.kept).amake(float(others[0]))
        return rows + made.mean()

    @batched(max_size=8, stack=True, device=str(HERE))
    async def on_another_gpu(self, rows: Tensor) -> Tensor:
        there = rows.to("cuda:1")
        with torch.cuda.device(1):
            torch.cuda._sleep(LONG)
        return there * 2

    async def keep(self, kept: Any) -> None:
        self.kept = kept

    async def noted_streams(self) -> list[Any]:
        return self.streams

    def _note_stream(self) -> None:
        if HERE.type == "cuda":
            priority = torch.cuda.current_stream(HERE).priority
            self.streams.append((not is_default_stream(), priority))


def _slowly(tensor: Tensor) -> Tensor:
    sleep(LONG)
    return tensor + 0


class Layer(nn.Module):
    """A part of a model, for distributed autograd."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8).to(HERE)

    async def run(self, x: Tensor) -> Tensor:
        sleep(LONG // 10)
        found: Tensor = torch.tanh(self.linear(x))
        return found

    async def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The second's gradient would be infinite times zero, if it were not absent."""
        return x * 2, (x * 0).sqrt()
