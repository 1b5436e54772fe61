"""Is a stream whose consumer is slow held back, or does its memory grow?"""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import torch
from torch import Tensor

from aiorpc_torch import create, remote

from ._compare import Row, Runs
from ._plot import ALSO_OURS, OTHER, OURS, Curve, Panel
from ._process import own_memory

LOOKS = 10
ITEM = 16_384  # floats in an item: 64 KiB
NAP = 0.002  # of the consumer, after each item
MB = 1_000_000


class Spring:
    """A generator without end, which counts its items."""

    def __init__(self) -> None:
        self.yielded = 0

    async def flow(self) -> AsyncIterator[Tensor]:
        while True:
            self.yielded += 1
            yield torch.ones(ITEM)

    async def so_far(self) -> tuple[int, int]:
        return self.yielded, own_memory()


class Look(NamedTuple):
    """A sample of a stream: items taken, items ahead of the consumer, bytes of both ends."""

    taken: int
    ahead: int
    here: int
    there: int


async def consume(items: int) -> list[Look]:
    spring = await create("server", Spring)
    looks, taken = [], 0
    async for _ in remote(spring).flow():
        taken += 1
        await asyncio.sleep(NAP)
        if taken % (items // LOOKS) == 0:
            yielded, there = await remote(spring).so_far()
            looks.append(Look(taken, yielded - taken, own_memory(), there))
        if taken == items:
            break
    return looks


def rows(runs: list[list[Look]]) -> list[Row]:
    ahead = [max(look.ahead for look in looks) for looks in runs]
    here = [(looks[-1].here - looks[0].here) / MB for looks in runs]
    there = [(looks[-1].there - looks[0].there) / MB for looks in runs]
    return [
        Row("slow consumer: items of 64 KiB ahead of it", "", Runs(ahead), "≤ 64"),
        Row("slow consumer: growth of the caller", "MB", Runs(here), "0"),
        Row("slow consumer: growth of the callee", "MB", Runs(there), "0"),
    ]


def panel(runs: list[list[Look]]) -> Panel:
    here = [[(look.here - looks[0].here) / MB for look in looks] for looks in runs]
    there = [[(look.there - looks[0].there) / MB for look in looks] for looks in runs]
    xs = [look.taken for look in runs[0]]
    curves = [
        Curve("all items so far", OTHER, xs, [[taken * ITEM * 4 / MB] for taken in xs]),
        Curve("callee", ALSO_OURS, xs, [*zip(*there, strict=True)]),
        Curve("caller", OURS, xs, [*zip(*here, strict=True)]),
    ]
    title = "A stream with a slow consumer"
    return Panel(title, "items of 64 KiB taken", "memory above the start, MB", curves, log="")
