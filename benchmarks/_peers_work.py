"""The workloads of `benchmarks.peers`, and the interface that each system implements.

A system is a `Peer`: four calls, and workloads that use them. A system without coroutines overrides
the workloads instead (`_peers_raw`).
"""

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ._lag import Ticker
from .batching import CALLERS, actions, new_policy

NAP = 0.01
HOLD = 0.002
WINDOW = 64
SMALL = torch.rand(4)
MB = 1_000_000
BIG = torch.rand(16 * MB // 4)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of each workload in one measurement."""

    lone: int = 300
    crowd: int = 3_000
    window: int = 5_000
    steps: int = 100
    naps: int = 1_000
    trips: int = 40
    large_trips: int = 8
    items: int = 2_000


QUICK = Sizes(lone=50, crowd=500, window=300, steps=5, naps=100, trips=8, large_trips=2, items=200)


@dataclass(frozen=True, slots=True)
class Workload:
    """A row of the table; `method` of a `Peer` measures it."""

    what: str
    unit: str
    method: str


def workloads(sizes: Sizes) -> list[Workload]:
    crowd = f"{sizes.crowd:,} small calls at once"
    return [
        Workload("lone small call", "µs", "lone"),
        Workload(crowd, "calls/s", "crowd"),
        Workload(f"at most {WINDOW} in flight", "calls/s", "window"),
        Workload(f"{CALLERS} callers of an MLP, batched", "calls/s", "batched"),
        Workload("the same, gathered by the client", "calls/s", "gathered"),
        Workload(f"{sizes.naps:,} calls that sleep {NAP * 1e3:.0f} ms", "s", "naps"),
        Workload("16 MB there and back", "MB/s", "carry"),
        Workload("128 MB there and back", "MB/s", "carry_large"),
        Workload("a NumPy array of 16 MB there and back", "MB/s", "carry_array"),
        Workload("the same as bytes", "MB/s", "carry_bytes"),
        Workload(f"stream of {sizes.items:,} numbers", "items/s", "stream"),
        Workload(f"loop lag, {crowd}", "ms", "lag"),
    ]


class Peer:
    """A running system: a server in another process, and four ways to call it."""

    freezes = False
    """True if the system excludes existing objects from garbage collections when it starts."""

    at_once: int | None = None
    """The number of calls that the system accepts at once; the client holds back the rest."""

    only: tuple[str, ...] | None = None
    """The workloads that the system can do, if not all of them."""

    def echo(self, x: Tensor) -> Awaitable[Tensor]:
        raise NotImplementedError

    def echo_any(self, x: Any) -> Awaitable[Any] | None:
        """Return an array or bytes from the server; None if the system has only tensors."""
        return self.echo(x)

    def nap(self) -> Awaitable[object]:
        raise NotImplementedError

    def select(self, state: Tensor) -> Awaitable[int]:
        raise NotImplementedError

    def count(self, items: int) -> AsyncIterator[int] | None:
        """Return numbers from a generator on the server; None if the system has no streams."""
        return None

    # ── the workloads ───────────────────────────────────────────────────────────────────────────

    async def lone(self, sizes: Sizes) -> float:
        times = []
        for _ in range(sizes.lone):
            start = perf_counter()
            await self.echo(SMALL)
            times.append(perf_counter() - start)
        return median(times) * 1e6

    async def crowd(self, sizes: Sizes) -> float:
        return sizes.crowd / await self._all_at_once(lambda: self.echo(SMALL), sizes.crowd)

    async def window(self, sizes: Sizes) -> float:
        return sizes.window / await _bounded(lambda: self.echo(SMALL), sizes.window, WINDOW)

    async def batched(self, sizes: Sizes) -> float:
        return await live(self.select, sizes.steps)

    async def gathered(self, sizes: Sizes) -> float | None:
        """Measure calls gathered by the client; None if the system does not offer it."""
        return None

    async def naps(self, sizes: Sizes) -> float:
        return await self._all_at_once(self.nap, sizes.naps)

    async def carry(self, sizes: Sizes) -> float:
        return await self._carried(BIG, sizes.trips)

    async def carry_large(self, sizes: Sizes) -> float:
        return await self._carried(BIG.repeat(8), sizes.large_trips)

    async def carry_array(self, sizes: Sizes) -> float | None:
        return await self._carried_any(BIG.numpy(), sizes.trips)

    async def carry_bytes(self, sizes: Sizes) -> float | None:
        return await self._carried_any(BIG.numpy().tobytes(), sizes.trips)

    async def _carried(self, x: Tensor, trips: int) -> float:
        start = perf_counter()
        for _ in range(trips):
            await self.echo(x)
        return 2 * trips * x.nbytes / MB / (perf_counter() - start)

    async def _carried_any(self, x: Any, trips: int) -> float | None:
        start = perf_counter()
        for _ in range(trips):
            if (echoed := self.echo_any(x)) is None:
                return None
            await echoed
        return 2 * trips * BIG.nbytes / MB / (perf_counter() - start)

    async def stream(self, sizes: Sizes) -> float | None:
        start = perf_counter()
        numbers = self.count(sizes.items)
        if numbers is None:
            return None
        assert [n async for n in numbers] == list(range(sizes.items))
        return sizes.items / (perf_counter() - start)

    async def lag(self, sizes: Sizes) -> float | None:
        async with Ticker() as ticker:
            await self.crowd(sizes)
        return ticker.worst

    async def _all_at_once(self, call: Callable[[], Awaitable[object]], calls: int) -> float:
        if self.at_once is not None:
            return await _bounded(call, calls, self.at_once)
        start = perf_counter()
        await asyncio.gather(*(call() for _ in range(calls)))
        return perf_counter() - start


async def _bounded(call: Callable[[], Awaitable[object]], calls: int, at_once: int) -> float:
    async def work(numbers: range) -> None:
        for _ in numbers:
            await call()

    start = perf_counter()
    await asyncio.gather(*(work(range(first, calls, at_once)) for first in range(at_once)))
    return perf_counter() - start


async def live(select: Callable[[Tensor], Awaitable[int]], steps: int) -> float:
    """Ask for actions from many coroutines, again and again; return calls per second."""

    async def caller(state: Tensor) -> None:
        for _ in range(steps):
            await select(state)

    start = perf_counter()
    await asyncio.gather(*map(caller, torch.rand(CALLERS, 4)))
    return CALLERS * steps / (perf_counter() - start)


# ── helpers of the systems ──────────────────────────────────────────────────────────────────────


Answer = Callable[[list[Tensor]], Awaitable[list[int]]]


def answer() -> Answer:
    """Return a function that applies the server's policy to many states."""
    policy = new_policy()

    async def found(states: list[Tensor]) -> list[int]:
        return actions(policy, torch.stack(states))

    return found


class Batcher:
    """A batching queue written by hand, for systems without batching.

    A batch runs when every caller is in it, or `HOLD` seconds after its first.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._waiting: list[tuple[Tensor, asyncio.Future[int]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, state: Tensor) -> "asyncio.Future[int]":
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[int] = loop.create_future()
        if not self._waiting:
            self._timer = loop.call_later(HOLD, self._leave)
        self._waiting.append((state, mine))
        if len(self._waiting) == CALLERS:
            self._leave()
        return mine

    def _leave(self) -> None:
        self._timer.cancel()
        batch, self._waiting = self._waiting, []
        task = asyncio.create_task(self._run(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: list[tuple[Tensor, asyncio.Future[int]]]) -> None:
        answers = await self._answer([state for state, _ in batch])
        for (_, future), found in zip(batch, answers, strict=True):
            future.set_result(found)


def uvloop_or_asyncio() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the factory of the fastest event loop that is installed."""
    try:
        new_event_loop: Callable[[], asyncio.AbstractEventLoop]
        new_event_loop = importlib.import_module("uvloop").new_event_loop
    except ModuleNotFoundError:
        return asyncio.new_event_loop
    return new_event_loop
