"""What a reader of the pages has: the classes and functions that their fragments name."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import torch
from torch import Tensor, nn

import aiorpc_torch as aiorpc
from aiorpc_torch import batched


class ShapeMismatch(Exception):
    def __init__(self, expected: int) -> None:
        super().__init__(f"expected {expected} numbers")
        self.expected = expected


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).detach()

    async def method(self, x: Tensor) -> Tensor:
        return x

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[int]:
        yield 1

    async def generator(self, count: int) -> AsyncIterator[Tensor]:
        for _ in range(count):
            yield torch.ones(2)


class ParameterServer:
    @batched(max_size=4)
    async def update(self, grads: list[Tensor]) -> list[int | Exception]:
        return [3 if each.numel() == 3 else ShapeMismatch(3) for each in grads]


class Pair:
    """Both objects of a fragment with `a` and `b`."""

    def __init__(self) -> None:
        self.loaded = False

    async def load(self, weights: Tensor) -> None:
        self.loaded = True

    async def step(self) -> bool:
        return self.loaded

    async def encode(self, x: Tensor) -> Tensor:
        return x + 1

    async def decode(self, x: Tensor) -> Tensor:
        return x - 1


class Env:
    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments  # an agent and a seed, or a seed

    async def train(self, steps: int) -> float:
        return 1 / steps

    async def reset(self, seed: int) -> int:
        return seed


def register_env() -> None:
    """Register an environment of this worker, once."""
    with contextlib.suppress(ValueError):
        aiorpc.register("env", Env())


class Model:
    async def infer(self, x: int) -> int:
        return 2 * x


@aiorpc.async_execution
async def slow_sum(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


def double(x: Tensor) -> Tensor:
    return 2 * x


def score(net: Net, x: Tensor) -> float:
    return net(x).sum().item()


def finished_future() -> "torch.futures.Future[int]":
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(7)
    return future


async def evaluate(server: object) -> float:
    """What a program computes of an object, while it is paused, say."""
    return 0.0
