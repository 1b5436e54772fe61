"""One turn of one system of `benchmarks.batchers`, in a process of its own.

A system's module has `figures(clients, seconds)`, which starts the system, measures it with each
number of clients and stops it.
"""

import asyncio
import importlib
import traceback
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from statistics import quantiles
from time import perf_counter
from typing import Any, NamedTuple

from ._compare import settle
from ._peers_process import end_with_parent

WARM_UP = 0.3  # of the seconds of a measurement
UNITS = ("requests/s", "p50, ms", "p99, ms")  # of `Figures`


class Figures(NamedTuple):
    """What clients see together: requests a second, and the time of one in ms."""

    rate: float
    median: float
    slowest: float


def take_turn(parent: Connection, module: str, clients: Sequence[int], seconds: float) -> None:
    """Measure the system of that module; send its figures or, in one line, why there are none."""
    end_with_parent()
    try:
        system = importlib.import_module(f".{module}", __package__)
        parent.send(system.figures(clients, seconds))
    except Exception as exc:
        traceback.print_exc()
        parent.send(traceback.format_exception_only(exc)[-1].strip())


class Times:
    """The times of requests, from the first one's start."""

    def __init__(self) -> None:
        settle()
        self.begun = perf_counter()
        self._times: list[float] = []

    def add(self, start: float) -> None:
        """Add a request that has ended now."""
        self._times.append(perf_counter() - start)

    def figures(self) -> Figures:
        times = self._times if len(self._times) > 1 else self._times * 2  # a busy machine, quickly
        percent = quantiles(times, n=100)
        rate = len(self._times) / (perf_counter() - self.begun)
        return Figures(rate, percent[49] * 1e3, percent[98] * 1e3)


async def asked(
    ask: Callable[[Any], Awaitable[int]], observations: Sequence[Any], seconds: float
) -> Figures:
    """Ask in a coroutine for each observation, again as soon as it is answered."""
    await _asked(ask, observations, WARM_UP * seconds)
    return await _asked(ask, observations, seconds)


async def _asked(
    ask: Callable[[Any], Awaitable[int]], observations: Sequence[Any], seconds: float
) -> Figures:
    times = Times()
    end = times.begun + seconds

    async def client(observation: Any) -> None:
        while (start := perf_counter()) < end:
            await ask(observation)
            times.add(start)

    await asyncio.gather(*map(client, observations))
    return times.figures()
