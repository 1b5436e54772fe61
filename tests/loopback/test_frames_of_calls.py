"""Calls of one frame: what is wrong with one of them is its own, and they start in order."""

import asyncio
import time
from operator import add, mul, sub
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import NotExported, call, seconds_left, testing
from tests.support.raw_connections import Tap

LOADED: list[str] = []
STARTED: list[int] = []


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


async def results(*calls: Any) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


async def first(number: int) -> None:
    STARTED.append(number)


async def second(number: int) -> None:
    STARTED.append(number)


async def third(number: int) -> None:
    STARTED.append(number)


@pytest.mark.usefixtures("world")
async def test_arguments_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their call fails; the others of the frame run."""
    tap = Tap(monkeypatch)
    found = await results(
        call("main", add, 1, 2), call("main", str, Loaded("bad")), call("main", str, Loaded("good"))
    )
    assert tap.count("calls") == 1
    assert found[::2] == [3, "good"]
    assert isinstance(found[1], ValueError)
    assert str(found[1]) == "it cannot be read"


async def test_a_call_that_is_not_exported() -> None:
    """It fails alone, and its arguments are not read."""
    LOADED.clear()
    async with testing.world(exports=[add, mul]):
        found = await results(
            call("main", add, 1, 2), call("main", sub, Loaded("never"), 1), call("main", mul, 3, 4)
        )
    assert found[::2] == [3, 12]
    assert isinstance(found[1], NotExported)
    assert not LOADED


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("alone", [True, False])
async def test_the_time_left_travels(alone: bool) -> None:
    """Each call has its own deadline, in the callee's clock."""
    begin = time.monotonic()
    with aiorpc.timeout(1000.0):
        if alone:
            (left,) = await results(call("main", seconds_left))
        else:
            left, _ = await results(call("main", seconds_left), call("main", add, 1, 2))
    assert 1000.0 - (time.monotonic() - begin) <= left <= 1000.0
    assert await call("main", seconds_left) is None


@pytest.mark.usefixtures("world")
async def test_calls_start_in_the_order_of_their_frame() -> None:
    """Whichever functions they are of."""
    STARTED.clear()
    functions = [first, second, third]
    await results(*(call("main", functions[number % 3], number) for number in range(20)))
    assert [*range(20)] == STARTED
