"""`@batched` as a user writes it: checked by mypy and pyright, never run."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import assert_type

from torch import Tensor

from aiorpc_torch import Broadcast, Round, RRef, batched, call, each


@dataclass
class Observation:
    frame: Tensor
    reward: float


class Agent:
    """Bodies of every kind; each is called with one item."""

    @batched(max_size=64)
    async def select(self, states: list[Tensor]) -> list[int]:
        return [0 for _ in states]

    @batched(max_size=64, max_wait=0.002, key=lambda name, score: len(name), max_pending=10)
    def rank(self, names: list[str], scores: list[float]) -> tuple[str, ...]:
        return tuple(names)

    @batched(Round(size=5, quorum=4, timeout=1.0))
    def update(self, gradients: list[list[Tensor]]) -> dict[str, Tensor]:
        return {}

    @batched(Round(lambda self: 3))
    async def order(self, names: list[str]) -> int:
        return each(range(len(names)))

    @batched(Round(3))
    def barrier(self) -> None:
        pass

    @batched(max_size=8)
    def same(self, names: list[str]) -> Broadcast[int]:
        return Broadcast(1)

    @batched(max_size=2)
    async def four(
        self, a: list[int], b: list[str], c: list[bytes], d: list[float]
    ) -> list[complex]:
        return []

    @batched(max_size=64, stack=True, device="cuda")
    def infer(self, states: Tensor) -> Tensor:
        return states

    @batched(max_size=64, stack=True)
    async def value(self, observed: Observation, *, discount: float = 0.9) -> dict[str, Tensor]:
        return {}

    @batched(max_size=64, max_weight=256, concat=True, pad_to=(64, 256), device="cuda")
    def embed(self, rows: Tensor) -> Tensor:
        return rows

    @batched(max_size=64, stack=True, pad_to=[8, 64])
    def padded(self, states: Tensor) -> Tensor:
        return states

    @batched(max_size=4)
    async def generate(self, prompts: list[str]) -> AsyncIterator[list[int | StopAsyncIteration]]:
        yield [len(prompt) or StopAsyncIteration() for prompt in prompts]

    @batched(max_size=4)
    def pairs(self, names: list[str], sizes: list[int]) -> Iterator[list[bytes]]:
        yield [b"" for _ in names]

    @batched(max_size=4, stack=True)
    def unroll(self, states: Tensor) -> Iterator[Tensor]:
        yield states

    @staticmethod
    @batched(max_size=4)
    async def shout(words: list[str]) -> list[str]:
        return words


@batched(max_size=8)
async def double(numbers: list[int]) -> list[int]:
    return numbers


@batched(max_size=8, stack=True)
def negative(x: Tensor) -> Tensor:
    return -x


async def remotely(rref: RRef[Agent], state: Tensor, observed: Observation) -> None:
    """One item in, one result out, through `call`."""
    assert_type(await call(rref, Agent.select, state), int)
    assert_type(await call(rref, Agent.rank, "a", 1.0), str)
    assert_type(await call(rref, Agent.update, [state]), dict[str, Tensor])
    assert_type(await call(rref, Agent.order, "a"), int)
    assert_type(await call(rref, Agent.barrier), None)
    assert_type(await call(rref, Agent.same, "a"), int)
    assert_type(await call(rref, Agent.four, 1, "b", b"c", 0.5), complex)
    assert_type(await call(rref, Agent.infer, state), Tensor)
    assert_type(await call(rref, Agent.embed, state), Tensor)
    assert_type(await call(rref, Agent.padded, state), Tensor)
    assert_type(await call(rref, Agent.value, observed, discount=0.5), dict[str, Tensor])
    assert_type(await call("worker", double, 3), int)
    assert_type(await call("worker", negative, state), Tensor)
    async for token in call(rref, Agent.generate, "a"):
        assert_type(token, int)
    async for pair in call(rref, Agent.pairs, "a", 1):
        assert_type(pair, bytes)
    async for tensor in call(rref, Agent.unroll, state):
        assert_type(tensor, Tensor)
    await call(rref, Agent.select, 3)  # type: ignore[call-overload]  # pyright: ignore
    await call(rref, Agent.rank, "a")  # type: ignore[call-overload]  # pyright: ignore
    await call("worker", double, "3")  # type: ignore[call-overload]  # pyright: ignore


async def locally(agent: Agent, state: Tensor) -> None:
    """The same, awaited where the object is."""
    assert_type(await agent.select(state), int)
    assert_type(agent.select(state), "asyncio.Future[int]")
    assert_type(await agent.rank("a", 1.0), str)
    assert_type(await agent.update([state]), dict[str, Tensor])
    assert_type(await agent.infer(state), Tensor)
    assert_type(await agent.embed(state), Tensor)
    assert_type(await Agent.shout("a"), str)
    assert_type(await double(3), int)
    assert_type(await negative(state), Tensor)
    assert_type(await asyncio.gather(double(3), agent.select(state)), tuple[int, int])
    async for token in agent.generate("a"):
        assert_type(token, int)
    async for tensor in agent.unroll(state):
        assert_type(tensor, Tensor)
    await agent.select(3)  # type: ignore[arg-type]  # pyright: ignore
    await agent.rank("a")  # type: ignore[call-arg]  # pyright: ignore
