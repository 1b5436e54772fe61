"""A peer of another process is killed before one callback of the caller's loop."""

import asyncio
import itertools
from typing import Any

from aiorpc_torch import RpcError, create, testing

from . import inside
from .loop import Clock, SteppingLoop
from .operations import Actor, Operation, Scene
from .search import leaves_of, over, real_monotonic, stack_of

PATIENCE = 20.0  # real seconds


def kill_at(operation: Operation, step: int) -> tuple[bool, list[str]]:
    """Run an operation, and kill its peer before a step.

    Return whether the operation had so many steps, and what is wrong.
    """
    loop = SteppingLoop(Clock(), is_virtual=False)
    with over(operation.way):
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(_kill_at(loop, operation, step))


async def _kill_at(loop: SteppingLoop, operation: Operation, step: int) -> tuple[bool, list[str]]:
    async with testing.world(["a"], freeze_gc=False, stop_timeout=5.0):
        scene = Scene(loop, await create("a", Actor))
        await operation.run(scene)
        await asyncio.sleep(0)
        before = inside.snapshot()
        is_hit, found = await _run(loop, scene, operation, step)
        return is_hit, found or await _rest(before)


async def _run(
    loop: SteppingLoop, scene: Scene, operation: Operation, step: int
) -> tuple[bool, list[str]]:
    task = asyncio.ensure_future(operation.run(scene))
    steps = itertools.count()
    is_hit = False

    def count() -> None:
        nonlocal is_hit
        if not task.done() and next(steps) == step:
            is_hit = True
            testing.kill("a")

    loop.before_callback = count
    await asyncio.wait({task}, timeout=PATIENCE)
    loop.before_callback = _nothing
    return is_hit, _ended(task)


def _ended(task: "asyncio.Task[Any]") -> list[str]:
    if not task.done():
        return ["it hangs: " + stack_of(task)]
    return [
        f"it raised {each!r}"
        for each in leaves_of(task.exception())
        if not isinstance(each, RpcError)
    ]


async def _rest(before: Any) -> list[str]:
    """Return what is left at the caller when the loss is known."""
    end = real_monotonic() + PATIENCE
    while (left := _of_calls(inside.snapshot() - before)) and real_monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return [f"left behind: {left}"] if left else []


def _of_calls(left: Any) -> dict[str, int]:
    return {name: count for name, count in left.items() if name.startswith(("caller", "callee"))}


def _nothing() -> None:
    pass
