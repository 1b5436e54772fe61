"""The shelf and the client of `benchmarks.shared_memory_soak`: they send tensors and check them.

A tensor is filled with its number. Who keeps one checks it again later, and who writes into one
must be the only one that sees it.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import rpc

from aiorpc_torch import Group, GroupError, WorkerLost, call, remote

SMALLEST, LARGEST = 1 << 10, 2 << 20  # bytes of a tensor
KEPT = 4  # tensors that each keeps
WRITTEN = -1.0

Kept = deque[tuple[Tensor, float]]
"""Tensors with their numbers."""


class Wrong(Exception):
    """A tensor does not hold its number."""


def draw(generator: random.Random) -> tuple[int, float]:
    """Return the elements of a tensor, log-uniform between the bounds, and its number."""
    size = math.exp(generator.uniform(math.log(SMALLEST), math.log(LARGEST)))
    return int(size) // 4, float(generator.randrange(1 << 20))


def check(x: Tensor, size: int, number: float) -> Tensor:
    """Return the tensor, whose first, middle and last elements must be its number."""
    found = [len(x), *(float(x[at]) for at in (0, size // 2, -1))]
    if found != [size, number, number, number]:
        raise Wrong(f"{size} times {number} became {found}")
    return x


def keep(kept: Kept, x: Tensor, number: float) -> None:
    """Keep a tensor; check the one that makes room for it, with all its elements."""
    kept.append((x, number))
    if len(kept) > KEPT:
        old, due = kept.popleft()
        if not bool((old == due).all()):
            raise Wrong(f"a kept tensor of {due} became {old}")


class Shelf:
    """A server of tensors, which keeps some of them."""

    def __init__(self) -> None:
        self.kept: Kept = deque()
        self.others: Group[Shelf] = Group([])

    async def meet(self, others: "Group[Shelf]", workers: Iterable[str]) -> None:
        """Know the others; connect to their workers, also by torch, which does so when it must."""
        self.others = others
        for worker in workers:
            await call(worker, int)
            await asyncio.to_thread(rpc.rpc_sync, worker, int)

    async def drop(self) -> None:
        self.kept.clear()

    async def take(self, x: Tensor, size: int, number: float) -> None:
        keep(self.kept, check(x, size, number), number)

    async def give(self, size: int, number: float) -> Tensor:
        x = torch.full((size,), number)
        keep(self.kept, x, number)
        return x

    async def echo(self, x: Any) -> Any:
        return x

    def write(self, x: Tensor, size: int, number: float) -> float:
        """Write into the argument, in a thread."""
        return float(check(x, size, number).fill_(WRITTEN)[-1])

    async def items(self, items: list[tuple[int, float]]) -> AsyncIterator[Tensor]:
        for size, number in items:
            yield torch.full((size,), number)

    async def ask(self, member: int, size: int, number: float) -> Tensor:
        """Have another shelf echo a tensor and return what it returned."""
        x = torch.full((size,), number)
        return check(await remote(self.others[member]).echo(x), size, number)


class Client:
    """A client that draws its calls from a seed of its own.

    Each kind of call returns the elements of the tensors that were sent and checked, one a message.
    """

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.kept: Kept = deque()

    async def call(self, shelves: "Group[Shelf]") -> list[int]:
        """Make a call of any kind."""
        size, number = draw(self.random)
        return await self.random.choice(KINDS)(self, shelves, size, number)

    def drop(self) -> None:
        self.kept.clear()

    def _shelf(self, shelves: "Group[Shelf]") -> Any:
        return remote(self.random.choice(shelves))

    async def take(self, shelves: "Group[Shelf]", size: int, number: float) -> list[int]:
        await self._shelf(shelves).take(torch.full((size,), number), size, number)
        return [size]

    async def give(self, shelves: "Group[Shelf]", size: int, number: float) -> list[int]:
        keep(self.kept, check(await self._shelf(shelves).give(size, number), size, number), number)
        return [size]

    async def give_and_write(self, shelves: "Group[Shelf]", size: int, number: float) -> list[int]:
        """Write into a result, which the callee keeps."""
        check(await self._shelf(shelves).give(size, number), size, number).fill_(WRITTEN)
        return [size]

    async def echo(self, shelves: "Group[Shelf]", size: int, number: float) -> list[int]:
        check(await self._shelf(shelves).echo(torch.full((size,), number)), size, number)
        return [size] * 2

    async def arrays(self, shelves: "Group[Shelf]", size: int, number: float) -> list[int]:
        """Send an array, and write into the one that comes back."""
        x = np.full(size, number, np.float32)
        found = await self._shelf(shelves).echo({"x": x, "small": x[:8]})
        check(torch.from_numpy(found["x"]), size, number).fill_(WRITTEN)
        expect(float(x[0]), number)
        return [size] * 2

    async def long_bytes(self, shelves: "Group[Shelf]", size: int, number: float) -> list[int]:
        x = np.full(size, number, np.float32).tobytes()
        expect(await self._shelf(shelves).echo([x, bytearray(x)]), [x, bytearray(x)])
        return [size] * 4

    async def parts(self, shelves: "Group[Shelf]", size: int, number: float) -> list[int]:
        """Send a tensor and a part of it, which share their memory."""
        x, part = torch.full((size,), number), self.random.randint(1, size)
        found = await self._shelf(shelves).echo({"x": x, "part": x[:part]})
        check(found["x"], size, number)
        check(found["part"], part, number)
        return [size] * 2

    async def write(self, shelves: "Group[Shelf]", size: int, number: float) -> list[int]:
        x = torch.full((size,), number)
        expect(await self._shelf(shelves).write(x, size, number), WRITTEN)
        check(x, size, number)
        return [size]

    async def group(self, shelves: "Group[Shelf]", size: int, number: float) -> list[int]:
        """Have every member write into its copy; the losses of a killed one are raised."""
        x = torch.full((size,), number)
        try:
            found = await remote(shelves).write(x, size, number)
        except GroupError as error:
            others = [each for each in error.exceptions if not isinstance(each, WorkerLost)]
            raise (others or error.exceptions)[0] from None
        finally:
            check(x, size, number)
        expect(found, [WRITTEN] * len(shelves))
        return [size] * len(shelves)

    async def stream(self, shelves: "Group[Shelf]", size: int, number: float) -> list[int]:
        items = [draw(self.random) for _ in range(self.random.randint(0, 8))]
        stream = self._shelf(shelves).items(items)
        return [len(check(x, *items.pop(0))) async for x in stream]

    async def ask(self, shelves: "Group[Shelf]", size: int, number: float) -> list[int]:
        """Have one worker send a tensor to another and back."""
        member = self.random.randrange(len(shelves))
        check(await self._shelf(shelves).ask(member, size, number), size, number)
        return [size] * 3


def expect(got: Any, due: Any) -> None:
    if got != due:
        raise Wrong(f"got {got} in place of {due}")


KINDS: list[Callable[[Client, "Group[Shelf]", int, float], Awaitable[list[int]]]] = [
    Client.take,
    Client.give,
    Client.give_and_write,
    Client.echo,
    Client.arrays,
    Client.long_bytes,
    Client.parts,
    Client.write,
    Client.group,
    Client.stream,
    Client.ask,
]
