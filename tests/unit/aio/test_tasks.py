"""Drivers of coroutines: transparent, a slow step is logged, a first step is taken at once."""

import asyncio
import contextlib
import contextvars
import gc
import logging
import threading
from collections.abc import Awaitable, Callable, Generator
from types import coroutine
from typing import Any

import pytest
import uvloop

from aiorpc_torch._aio import tasks
from aiorpc_torch._aio.slow_steps import SlowSteps
from aiorpc_torch._aio.tasks import (
    SLOW_STEP,
    StepContext,
    Steps,
    start_task,
)


class Clock:
    """What `perf_counter` shows."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tasks, "perf_counter", clock)
    monkeypatch.setattr(tasks, "note_slow_step", SlowSteps().note)
    return clock


@pytest.fixture(autouse=True)
def _at_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "aiorpc_torch")


async def awaited(coroutine: Any, name: str) -> Any:
    """Make a coroutine for a task: from Python 3.12 on, a marked generator is none."""
    return await Steps(coroutine, name)


@coroutine
def pause(value: Any = None) -> Generator[Any, Any, Any]:
    """One step; its value is what the coroutine is sent."""
    return (yield value)


# ── it is the coroutine ─────────────────────────────────────────────────────────────────────────


def run(steps: Any, *sent: Any) -> tuple[list[Any], Any]:
    """What it yields as it is sent these, and what it returns."""
    coro, yields = steps, []
    try:
        for value in (None, *sent):
            yielded = coro.send(value)
            yields.append(yielded)
    except StopIteration as stop:
        return yields, stop.value
    raise AssertionError("it has not ended")


def test_values_go_in_and_out() -> None:
    """What is yielded, what is sent and what is returned."""

    async def method() -> list[Any]:
        return [await pause("first"), await pause("second"), await pause()]

    assert run(Steps(method(), "m"), 1, 2, 3) == (["first", "second", None], [1, 2, 3])


def test_without_a_step() -> None:
    """A coroutine that never waits ends at once."""

    async def method() -> str:
        return "value"

    assert run(Steps(method(), "m")) == ([], "value")


async def test_on_a_loop() -> None:
    """Awaiting futures, tasks and sleeps."""

    async def method(future: "asyncio.Future[int]") -> tuple[int, str]:
        await asyncio.sleep(0)
        return await future, await asyncio.wait_for(asyncio.sleep(0, "slept"), 5)

    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(awaited(method(future), "m"))
    await asyncio.sleep(0)
    future.set_result(3)
    assert await task == (3, "slept")


@pytest.mark.parametrize("exc", [ValueError("v"), KeyboardInterrupt(), StopAsyncIteration("s")])
def test_what_it_raises(exc: BaseException) -> None:
    """The very object, with the coroutine in its traceback."""

    async def method() -> None:
        await pause()
        raise exc

    steps = Steps(method(), "m")
    steps.send(None)
    with pytest.raises(type(exc)) as caught:
        steps.send(None)
    assert caught.value is exc
    assert caught.traceback[-1].name == "method"


def test_what_is_thrown_in() -> None:
    """It may be caught there, and the coroutine goes on."""
    seen: list[BaseException] = []

    async def method() -> str:
        try:
            await pause()
        except ValueError as exc:
            seen.append(exc)
        return await pause("after")

    steps = Steps(method(), "m")
    steps.send(None)
    thrown = ValueError("in")
    assert steps.throw(thrown) == "after"
    assert seen == [thrown]
    with pytest.raises(StopIteration) as stop:
        steps.send("end")
    assert stop.value.value == "end"


async def test_cancellation() -> None:
    """It reaches what is awaited, and `finally` may await too."""
    ended = asyncio.Event()
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def method() -> None:
        try:
            await future
        finally:
            await asyncio.sleep(0)
            ended.set()

    task = asyncio.create_task(awaited(method(), "m"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future.cancelled()
    assert ended.is_set()


async def test_a_cancellation_that_is_refused() -> None:
    """The coroutine may catch it and return."""

    async def method() -> str:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return "stayed"

    task = asyncio.create_task(awaited(method(), "m"))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "stayed"


def test_close_closes_the_coroutine() -> None:
    """GeneratorExit is its to see, and its `finally` runs at once."""
    seen: list[str] = []

    async def method() -> None:
        try:
            await pause()
        except GeneratorExit:
            seen.append("exit")
            raise
        finally:
            seen.append("finally")

    steps = Steps(method(), "m")
    steps.send(None)
    steps.close()
    assert seen == ["exit", "finally"]


# ── who holds the loop ──────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("worlds.slow_loop")
def test_a_slow_step_is_named(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The method and for how long."""

    async def method() -> None:
        clock.now += 0.25
        await pause()
        clock.now += 1.5

    steps = Steps(method(), "Policy.act")
    steps.send(None)
    clock.now += 60  # it is warned of once a minute
    with pytest.raises(StopIteration):
        steps.send(None)
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("Policy.act held the event loop for 0.25 s")
    assert caplog.messages[1].startswith("Policy.act held the event loop for 1.50 s")


def test_quick_steps_and_waiting_are_not(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Neither many quick steps nor a long wait is slow."""

    async def method() -> None:
        for _ in range(10):
            clock.now += 0.9 * SLOW_STEP
            await pause()

    steps = Steps(method(), "m")
    for _ in range(10):
        steps.send(None)
        clock.now += 100
    with pytest.raises(StopIteration):
        steps.send(None)
    assert caplog.messages == []


@pytest.mark.parametrize("end", ["raises", "returns", "is thrown at"])
def test_a_slow_last_step_is_named(
    clock: Clock, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """However it ends."""

    async def method() -> None:
        try:
            await pause()
        finally:
            clock.now += 2
            if end == "raises":
                raise KeyError

    steps = Steps(method(), "m")
    steps.send(None)
    with pytest.raises((KeyError, StopIteration, ZeroDivisionError)):
        steps.throw(ZeroDivisionError()) if end == "is thrown at" else steps.send(None)
    assert [text[:34] for text in caplog.messages] == ["m held the event loop for 2.00 s: "]


# ── each step inside something ──────────────────────────────────────────────────────────────────


@pytest.fixture
def inside() -> tuple[list[str], Any]:
    """Return a log of events, and a context manager that adds to it."""
    happened: list[str] = []

    @contextlib.contextmanager
    def around() -> Generator[None]:
        happened.append("in")
        try:
            yield
        finally:
            happened.append("out")

    return happened, around


async def test_each_step_is_inside_and_no_wait(inside: tuple[list[str], Any]) -> None:
    """State of the thread is not visible to others while the coroutine waits."""
    happened, around = inside

    async def body() -> str:
        happened.append("first")
        await asyncio.sleep(0)
        happened.append("second")
        with pytest.raises(LookupError):
            await failing()
        return "done"

    async def failing() -> None:
        await asyncio.sleep(0)
        raise LookupError

    async def whole() -> str:
        return await StepContext(around, body())

    task = asyncio.create_task(whole())
    while not task.done():
        await asyncio.sleep(0)
        assert happened[-1] == "out"
    assert task.result() == "done"
    assert happened == ["in", "first", "out", "in", "second", "out", "in", "out"]


@pytest.mark.parametrize("end", [LookupError, asyncio.CancelledError])
async def test_what_it_raises_inside(
    end: type[BaseException], inside: tuple[list[str], Any]
) -> None:
    """Goes through, as does a cancellation that comes from outside."""
    happened, around = inside

    async def body() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise end from None

    async def whole() -> None:
        await StepContext(around, body())

    task = asyncio.create_task(whole())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(end):
        await task
    assert happened == ["in", "out"] * 2


# ── the first step ──────────────────────────────────────────────────────────────────────────────

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


class Closing:
    """In a cycle: its finalizer runs in a collection, and schedules something."""

    def __init__(self, seen: list[str]) -> None:
        self.itself, self.seen = self, seen

    def __del__(self) -> None:
        asyncio.get_running_loop().call_soon(self.seen.append, "finalizer")


class Collecting(str):
    """A name of a task, which is looked at while the task is made."""

    def __str__(self) -> str:
        gc.collect()
        return "collecting"


def start_beside(garbage: type[Closing], seen: list[str]) -> "asyncio.Task[None]":
    """Start a task; while it is made, garbage is collected, whose finalizer runs."""

    async def step() -> None:
        seen.append("step")

    garbage(seen)
    loop = asyncio.get_running_loop()
    return start_task(step(), loop, Collecting(), contextvars.copy_context())


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_step_on_either_loop(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """It is taken at once, and what a finalizer schedules meanwhile is not lost."""
    seen: list[str] = []

    def start() -> "asyncio.Task[None]":
        task = start_beside(Closing, seen)
        assert seen == ["step"]
        assert "call_soon" not in vars(asyncio.get_running_loop())
        return task

    async def main() -> None:
        await (await in_callback(start))
        await asyncio.sleep(0)
        assert seen == ["step", "finalizer"]

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


class ClosingInTask(Closing):
    """In a cycle: its finalizer begins a task."""

    def __del__(self) -> None:
        self.seen.append("finalizer")
        self.task = asyncio.get_running_loop().create_task(self.close(self.seen))

    @staticmethod
    async def close(seen: list[str]) -> None:
        seen.append("task of the finalizer")


async def test_a_task_that_a_finalizer_begins_meanwhile() -> None:
    """It waits for the loop's next iteration, and the own step is taken at once."""
    seen: list[str] = []

    def start() -> "asyncio.Task[None]":
        task = start_beside(ClosingInTask, seen)
        assert seen == ["finalizer", "step"]
        return task

    await (await in_callback(start))
    await asyncio.sleep(0)
    assert seen == ["finalizer", "step", "task of the finalizer"]


async def test_a_loop_that_is_traced() -> None:
    """Its own `call_soon` stays, and gets what is scheduled."""
    loop, seen = asyncio.new_event_loop(), []

    async def step() -> str:
        return "value"

    def traced(callback: Any, *args: Any, **more: Any) -> Any:
        seen.append(callback)
        return type(loop).call_soon(loop, callback, *args, **more)

    async def main() -> str:
        return await (await in_callback(lambda: begin(step())))

    loop.call_soon = traced  # type: ignore[method-assign, assignment]
    try:
        assert await asyncio.to_thread(loop.run_until_complete, main()) == "value"
        assert vars(loop)["call_soon"] is traced
        assert seen
    finally:
        loop.close()
