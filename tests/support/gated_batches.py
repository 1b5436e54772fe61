"""A batched method to ask, whose gate tests open and shut, and how to ask it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import Round, RRef, batched, each, remote


class Gated:
    """Notes each batch, lets it stand at the gate if that is shut, and answers as it is told."""

    def __init__(self, answer: Callable[[list[Any]], Any] = list) -> None:
        self.answer = answer
        self.batches: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def here(self) -> None:
        """Answered once all that was called before has begun."""

    async def pass_(self, items: Any) -> Any:
        self.batches.append(items)
        await self.gate.wait()
        return self.answer(items)


def new_gated(
    *policy: Any, answer: Callable[[list[Any]], Any] | None = None, **fill: Any
) -> tuple[Any, Any]:
    """An object with a batched `ask`, and the same as a caller elsewhere has it.

    Without an `answer`, each caller gets its item back.
    """

    class Made(Gated):
        @batched(*policy, **fill)
        async def ask(self, items: Any, scale: Any = 1) -> Any:
            return await self.pass_(items)

    of_round = any(isinstance(given, Round) for given in (*policy, *fill.values()))
    made = Made(answer or (each if of_round else list))
    return made, remote(RRef(made))


@pytest.fixture
def gated(world: aiorpc.types.Worker) -> Callable[..., tuple[Any, Any]]:
    """`new_gated`, in a world of one."""
    return new_gated


async def outcome(awaitable: Awaitable[Any]) -> Any:
    """What it returns or raises, as a value."""
    try:
        return await awaitable
    except Exception as exc:
        return exc


def asks(far: Any, *items: Any) -> list["asyncio.Task[Any]"]:
    return [asyncio.create_task(outcome(far.ask(item))) for item in items]


async def arrived(far: Any) -> None:
    """Every call and cancellation until now has reached its queue, which has looked at it."""
    for _ in range(2):
        await asyncio.sleep(0)
        await far.here()


async def cancel(far: Any, *tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await arrived(far)
    assert all(task.cancelled() for task in tasks)


async def settled(*awaitables: Awaitable[Any]) -> list[Any]:
    """What each returns or raises, and none of them is left waiting."""
    async with asyncio.timeout(30.0):
        return await asyncio.gather(*map(outcome, awaitables))


@pytest.fixture
async def skip() -> AsyncIterator[Callable[[float], None]]:
    """Let the loop believe that so many seconds have passed."""
    loop = asyncio.get_running_loop()
    real, skipped = loop.time, 0.0

    def forward(seconds: float) -> None:
        nonlocal skipped
        skipped += seconds

    loop.time = lambda: real() + skipped  # type: ignore[method-assign]
    yield forward
    del loop.time


def by_name(item: Any, scale: Any) -> str:
    return str(item)[0]


def raises(exc: BaseException) -> Callable[[list[Any]], Any]:
    def answer(items: list[Any]) -> Any:
        raise exc

    return answer
