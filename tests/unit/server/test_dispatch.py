"""Calls of one frame: what is wrong with one of them is its own."""

import asyncio
import time
from collections.abc import AsyncIterator
from operator import add, mul, sub
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import NotExported, call
from aiorpc_torch._aio.deadlines import current_deadline, time_left
from aiorpc_torch._protocol.frames import CALLS
from tests.support.raw_connections import Tap
from tests.support.two_ends import TwoEnds, two_ends

LOADED: list[str] = []


def load(name: str) -> str:
    LOADED.append(name)
    if name == "bad":
        raise ValueError("it cannot be read")
    return name


class Loaded:
    """An argument that the callee loads."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return load, (self.name,)


def seconds_left() -> float | None:
    return time_left(current_deadline())


STARTED: list[int] = []


async def first(number: int) -> None:
    STARTED.append(number)


async def second(number: int) -> None:
    STARTED.append(number)


async def third(number: int) -> None:
    STARTED.append(number)


@pytest.fixture
async def ends() -> AsyncIterator[TwoEnds]:
    async with two_ends() as ends:
        LOADED.clear()
        STARTED.clear()
        yield ends


async def results(*calls: Any) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_arguments_that_cannot_be_read(
    ends: TwoEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their call fails; the others of the frame run."""
    tap = Tap(monkeypatch)
    found = await results(
        call("far", add, 1, 2), call("far", str, Loaded("bad")), call("far", str, Loaded("good"))
    )
    assert tap.count(CALLS) == 1
    assert found[::2] == [3, "good"]
    assert isinstance(found[1], ValueError)
    assert str(found[1]) == "it cannot be read"


async def test_a_call_that_is_not_exported() -> None:
    """It fails alone, and its arguments are not read."""
    LOADED.clear()
    async with two_ends([add, mul]):
        found = await results(
            call("far", add, 1, 2), call("far", sub, Loaded("never"), 1), call("far", mul, 3, 4)
        )
    assert found[::2] == [3, 12]
    assert isinstance(found[1], NotExported)
    assert not LOADED


@pytest.mark.parametrize("alone", [True, False])
async def test_the_time_left_travels(ends: TwoEnds, alone: bool) -> None:
    """Each call has its own deadline, in the callee's clock."""
    begin = time.monotonic()
    with aiorpc.timeout(1000.0):
        if alone:
            (left,) = await results(call("far", seconds_left))
        else:
            left, _ = await results(call("far", seconds_left), call("far", add, 1, 2))
    assert 1000.0 - (time.monotonic() - begin) <= left <= 1000.0
    assert await call("far", seconds_left) is None


async def test_calls_start_in_the_order_of_their_frame(ends: TwoEnds) -> None:
    """Whichever functions they are of."""
    functions = [first, second, third]
    await results(*(call("far", functions[number % 3], number) for number in range(20)))
    assert [*range(20)] == STARTED
