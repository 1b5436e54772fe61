"""Lone calls and results in a world of one."""

import asyncio
from typing import Any

import pytest
import torch

from aiorpc_torch import RRef, call, remote
from tests.unit.wire.test_messages import same


class Echo:
    async def on_loop(self, *args: Any) -> Any:
        return args[0] if args else None

    def plain(self, *args: Any) -> Any:
        return args[0] if args else None


@pytest.mark.parametrize("name", ["on_loop", "plain"])
async def test_values_there_and_back(world: Any, name: str) -> None:
    """Whatever frame a value takes, it arrives as it was."""
    echo = getattr(remote(RRef(Echo())), name)
    assert await echo() is None
    for value in (None, True, 7, -1.5, "ä\ud800", b"\0", [1], 2**70, "x" * 5000):
        assert same(await echo(value), value)
    assert same(await echo(torch.arange(4).reshape(2, 2).T), torch.arange(4).reshape(2, 2).T)


class Waiting:
    """Methods whose first step ends in a wait of each kind."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    async def yields(self) -> str:
        asyncio.get_running_loop().call_soon(self.steps.append, "other")
        await asyncio.sleep(0)
        self.steps.append("yields")
        return "yields"

    async def awaits(self) -> str:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, "awaits")
        return str(await future)

    async def times_out(self) -> str:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        except TimeoutError:
            return "times_out"
        return "did not"


@pytest.mark.parametrize("name", ["yields", "awaits", "times_out"])
async def test_a_first_step_that_waits(world: Any, name: str) -> None:
    """It runs at once, the rest when its wait is over: `sleep(0)` lets others run first."""
    waiting = Waiting()
    method = getattr(remote(RRef(waiting)), name)
    for _ in range(3):
        assert await method() == name
    assert waiting.steps == (["other", "yields"] * 3 if name == "yields" else [])


class Unnamed:
    def __repr__(self) -> str:
        raise ValueError("no repr")

    async def slow(self) -> int:
        await asyncio.sleep(0.05)
        return 7


async def answer(_: Unnamed) -> int:
    return 8


async def test_an_object_whose_repr_fails(world: Any) -> None:
    """A function that is called with it runs nobody's `__repr__`, and breaks no other call."""
    rref = RRef(Unnamed())
    slow = asyncio.ensure_future(remote(rref).slow())
    assert await call(rref, answer) == 8
    assert await slow == 7
