"""The options of a local world for its children are checked where they are given."""

import asyncio
import functools
from typing import Any

import pytest

import aiorpc_torch as aiorpc


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"start": "fork"}, ValueError, 'start must be "forkserver" or "spawn", got \'fork\''),
        ({"preload": "numpy"}, TypeError, "preload must be a tuple of module names, got 'numpy'"),
        ({"preload": (asyncio,)}, TypeError, "preload must be a tuple of module names, got"),
        ({"loop_factory": "uvloop"}, TypeError, "loop_factory must make an event loop when"),
        ({"loop_factory": lambda: None}, TypeError, "loop_factory must be what child processes"),
        (
            {"loop_factory": functools.partial(lambda: None)},
            TypeError,
            "loop_factory must be what child processes can import, got .*: put it into a module",
        ),
        ({"initializer": "cuda:0"}, TypeError, "initializer must be a function, got 'cuda:0'"),
        ({"initializer": lambda name: None}, TypeError, "initializer must be what child processes"),
    ],
)
async def test_wrong_options(options: Any, error: type[Exception], match: str) -> None:
    """Before any process starts."""
    with pytest.raises(error, match=match):
        async with aiorpc.local_world(1, **options):
            pass
    with pytest.raises(error, match=match):
        await asyncio.to_thread(aiorpc.run_local, _main, 2, **options)


async def test_another_effect_of_a_failure() -> None:
    """It is refused: it would be that of "continue"."""
    effect: Any = "raise"
    with pytest.raises(ValueError, match='on_failure must be "continue" or "stop", got \'raise\''):
        await asyncio.to_thread(aiorpc.run_local, _main, 1, on_failure=effect)


async def test_a_main_that_children_cannot_import() -> None:
    """A local function, or one of a notebook, is refused before any process starts."""

    async def main(me: aiorpc.types.Worker) -> str:
        return me.name

    with pytest.raises(TypeError, match="main must be what child processes can import, got <func"):
        await asyncio.to_thread(aiorpc.run_local, main, 2)
    assert await asyncio.to_thread(aiorpc.run_local, main, 1) == "worker0", "without children"


async def test_run_local_in_an_event_loop() -> None:
    """The error says what to use there. (No coroutine is left that was never awaited.)"""
    with pytest.raises(RuntimeError, match=r"one runs in this thread: use `async with local_world"):
        aiorpc.run_local(_main, 1)


async def _main(me: aiorpc.types.Worker) -> None:
    raise AssertionError("it must not run")
