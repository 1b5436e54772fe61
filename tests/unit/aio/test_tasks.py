"""The first step of a task: taken at once, in the task, and in no other task's step."""

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiorpc_torch._aio.tasks import start_task

CONTEXT_VALUE = contextvars.ContextVar("value", default="outer")


async def in_callback(function: Callable[[], Any]) -> Any:
    """Return the result of `function`, called by the loop and not by a task."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    loop.call_soon(lambda: done.set_result(function()))
    return await done


def begin(step: Awaitable[Any], **options: Any) -> "asyncio.Task[Any]":
    """Start a task of `step`; options are those of `start_task`."""

    async def run() -> Any:
        return await step

    context = options.pop("context", None) or contextvars.copy_context()
    return start_task(run(), asyncio.get_running_loop(), "started", context)


async def test_a_coroutine_that_never_waits_is_done_at_once() -> None:
    """Its result is there before another callback runs; a task with its name has run it."""

    async def step() -> Any:
        task = asyncio.current_task()
        assert task is not None
        return task, task.get_name()

    def start() -> Any:
        task = begin(step())
        return task, task.done()

    task, was_done = await in_callback(start)
    assert was_done
    assert task.result() == (task, "started")


async def test_a_timeout_in_the_first_step_works() -> None:
    """`asyncio.timeout` cancels the task that entered it, also if that was in its first step."""

    async def step() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        return "late"

    assert await (await in_callback(lambda: begin(step()))) == "late"


async def test_each_task_has_its_context() -> None:
    """A variable set in the first step is seen in the later ones, and by no one else."""

    async def step() -> str:
        CONTEXT_VALUE.set("inner")
        await asyncio.sleep(0)
        return CONTEXT_VALUE.get()

    task = await in_callback(lambda: begin(step()))
    assert CONTEXT_VALUE.get() == "outer"
    assert await task == "inner"


async def test_an_exception_ends_the_task_only() -> None:
    """It is the task's, and neither the callback's nor the loop's."""

    async def step() -> None:
        raise KeyError("own")

    task = await in_callback(lambda: begin(step()))
    with pytest.raises(KeyError, match="own"):
        await task


async def test_inside_a_task() -> None:
    """A task started by another runs; no step is taken inside another task's on Python 3.11."""

    async def step() -> str:
        return "done"

    assert await begin(step()) == "done"


async def test_steps_that_other_threads_add_are_kept() -> None:
    """Callbacks that threads schedule meanwhile all run, and so do all tasks."""
    loop, stop, seen = asyncio.get_running_loop(), threading.Event(), []
    sent = 0

    def send() -> None:
        nonlocal sent
        while not stop.is_set() or not sent:
            loop.call_soon_threadsafe(seen.append, sent)
            sent += 1
            stop.wait(1e-5)

    async def step() -> int:
        return 1

    thread = threading.Thread(target=send)
    thread.start()
    tasks = [task for _ in range(20) for task in await in_callback(lambda: _begin_many(step))]
    stop.set()
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert sum(await asyncio.gather(*tasks)) == len(tasks)
    assert seen == [*range(sent)]


def _begin_many(step: Callable[[], Awaitable[int]]) -> list["asyncio.Task[Any]"]:
    return [begin(step()) for _ in range(200)]
