"""`InlineFuture` with both kinds of asyncio's tasks: in C, which are used, and in Python."""

import asyncio
import contextvars
import sys

import pytest

from aiorpc_torch._client.pending import InlineFuture, resume_all

TASKS = [asyncio.Task, asyncio.tasks._PyTask]  # type: ignore[attr-defined]


@pytest.fixture(params=TASKS, ids=["C", "Python"])
def make_task(request, monkeypatch):
    """Start a coroutine in a task of either kind, up to where it waits."""
    if request.param is not asyncio.Task and sys.version_info >= (3, 14):
        # A Python without the C module; since 3.14 each kind of task has its own current one.
        for module in (asyncio, asyncio.tasks):
            monkeypatch.setattr(module, "current_task", asyncio.tasks._py_current_task)

    async def make(coroutine) -> asyncio.Task:
        task = request.param(coroutine, loop=asyncio.get_running_loop())
        await asyncio.sleep(0)
        return task

    return make


async def on_the_loop(step) -> None:
    """Run `step` outside any task, as a callback."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon(lambda: (step(), done.set()))
    await done.wait()


async def result_of(future: InlineFuture):
    return await future


async def test_the_task_goes_on_at_once(make_task) -> None:
    """When `resume` returns, the task has run its step, in its own context."""
    var = contextvars.ContextVar("var", default=0)
    future = InlineFuture(asyncio.get_running_loop())
    seen = []

    async def waiter() -> None:
        var.set(7)
        answer = await future
        seen.append((answer, var.get(), asyncio.current_task()))

    task = await make_task(waiter())

    def step() -> None:
        assert future.set_result("here")
        future.resume()
        assert task.done()

    await on_the_loop(step)
    assert seen == [("here", 7, task)]


async def test_cancelled_while_it_waits(make_task) -> None:
    """The task sees CancelledError; a later result is ignored."""
    future = InlineFuture(asyncio.get_running_loop())
    task = await make_task(result_of(future))
    task.cancel()
    assert not future.set_result("late")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert repr(future) == "<InlineFuture cancelled>"


async def test_answered_and_then_cancelled(make_task) -> None:
    """Whichever comes first holds; a task that is cancelled between the two ends cancelled."""
    future = InlineFuture(asyncio.get_running_loop())
    task = await make_task(result_of(future))
    assert future.set_result("here")
    task.cancel()
    await on_the_loop(future.resume)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_answered_before_it_is_awaited() -> None:
    """No task waits, so none is to be resumed."""
    future = InlineFuture(asyncio.get_running_loop())
    assert not future.set_result(1)
    assert await future == 1


async def test_a_callback_of_a_done_future_is_called() -> None:
    """In the next iteration, in its context and once, as with an `asyncio.Future`."""
    loop, var = asyncio.get_running_loop(), contextvars.ContextVar("var", default=0)
    answered, cancelled = InlineFuture(loop), InlineFuture(loop)
    answered.set_result(1)
    cancelled.cancel()
    context, seen = contextvars.Context(), []
    context.run(var.set, 7)
    for future in (answered, cancelled):
        future.add_done_callback(lambda done: seen.append((done, var.get())), context=context)
    assert seen == []
    await asyncio.sleep(0)
    expected = [(answered, 7), (cancelled, 7)]
    assert sorted(seen, key=lambda each: each[0] is cancelled) == expected
    answered.resume()
    assert len(seen) == 2


async def test_cancelled_before_its_first_wait(make_task) -> None:
    """A task that is told to stop while it runs stops where it waits next."""
    future = InlineFuture(asyncio.get_running_loop())

    async def waiter() -> None:
        asyncio.current_task().cancel()
        await future

    task = await make_task(waiter())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_timeouts_work(make_task) -> None:
    """asyncio.timeout, which cancels its task, turns into TimeoutError."""
    future = InlineFuture(asyncio.get_running_loop())

    async def waiter() -> None:
        async with asyncio.timeout(0.001):
            await future

    with pytest.raises(TimeoutError):
        await (await make_task(waiter()))


async def test_a_system_exit_does_not_stop_the_others() -> None:
    """SystemExit in a step propagates; the other tasks resume in the next iteration."""

    def stop(_: InlineFuture) -> None:
        raise SystemExit(3)

    loop = asyncio.get_running_loop()
    future = InlineFuture(loop)
    task = asyncio.create_task(result_of(future))
    await asyncio.sleep(0)
    future.set_result("here")
    first = InlineFuture(loop)
    first.add_done_callback(stop, context=contextvars.Context())
    first.set_result(None)

    def step() -> None:
        with pytest.raises(SystemExit):
            resume_all([first, future], loop)

    await on_the_loop(step)
    assert await task == "here"
