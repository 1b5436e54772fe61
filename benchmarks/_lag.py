"""How late does an event loop run timers while other work keeps it busy?"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from statistics import quantiles
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from ._compare import Row, repeated

TICK = 0.001
IN_FLIGHT = 64

Call = Callable[[], Coroutine[Any, Any, Any]]
"""A function that makes a call to be awaited."""


class Ticker:
    """A context manager that records how late, in ms, sleeps of 1 ms end on this loop."""

    def __init__(self) -> None:
        self.lags: list[float] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(2 * TICK)
        self.lags.clear()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.sleep(2 * TICK)  # the tick that was due meanwhile counts
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _tick(self) -> None:
        while True:
            start = perf_counter()
            await asyncio.sleep(TICK)
            self.lags.append((perf_counter() - start - TICK) * 1e3)

    @property
    def worst(self) -> float:
        """Return the longest lag."""
        return max(self.lags)

    @property
    def p99(self) -> float:
        """Return the 99th percentile of the lag."""
        return quantiles(self.lags, n=100)[98]


async def lag_rows(call: Call, repeat: int, calls: int, seconds: float) -> list[Row]:
    """Measure the lag of a loop that makes calls. Raw torch blocks it throughout."""
    worst = await repeated(repeat, partial(while_launched, call, calls))
    busy = await repeated(repeat, partial(while_in_flight, call, seconds))
    idle = await repeated(repeat, partial(while_idle, seconds))
    return [
        Row(f"longest lag of the loop, {calls:,} at once", "ms", worst, "≤ 30"),
        Row(f"p99 of the lag, {IN_FLIGHT} in flight", "ms", busy, "≤ 3"),
        Row("p99 of the lag, nothing in flight", "ms", idle, "the machine's own"),
    ]


async def while_launched(call: Call, calls: int) -> float:
    async with Ticker() as ticker:
        await asyncio.gather(*(call() for _ in range(calls)))
    return ticker.worst


async def while_in_flight(call: Call, seconds: float) -> float:
    async def again_and_again() -> None:
        while perf_counter() < end:
            await call()

    end = perf_counter() + seconds
    async with Ticker() as ticker:
        await asyncio.gather(*(again_and_again() for _ in range(IN_FLIGHT)))
    return ticker.p99


async def while_idle(seconds: float) -> float:
    async with Ticker() as ticker:
        await asyncio.sleep(seconds)
    return ticker.p99
