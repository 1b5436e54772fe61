"""What a task waits for, against the tasks of asyncio: in C, as they are used, and in Python."""

import asyncio
import contextvars

import pytest

from aiorpc_torch._aio.inline_future import Wait, wake_all

TASKS = [asyncio.Task, asyncio.tasks._PyTask]  # type: ignore[attr-defined]


@pytest.fixture(params=TASKS, ids=["C", "Python"])
def make_task(request):
    """Start a coroutine in a task of either kind, up to where it waits."""

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


async def awaited(wait: Wait):
    return await wait


async def test_the_task_goes_on_at_once(make_task) -> None:
    """When `wake` returns, the task has taken its step, in its own context and as itself."""
    var = contextvars.ContextVar("var", default=0)
    wait = Wait(asyncio.get_running_loop())
    seen = []

    async def waiter() -> None:
        var.set(7)
        answer = await wait
        seen.append((answer, var.get(), asyncio.current_task()))

    task = await make_task(waiter())

    def step() -> None:
        assert wait.settle("here")
        wait.wake()
        assert task.done()

    await on_the_loop(step)
    assert seen == [("here", 7, task)]


async def test_cancelled_while_it_waits(make_task) -> None:
    """The task sees CancelledError, and an answer that comes later is not wanted."""
    wait = Wait(asyncio.get_running_loop())
    task = await make_task(awaited(wait))
    task.cancel()
    assert not wait.settle("late")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert repr(wait) == "<Wait cancelled>"


async def test_answered_and_then_cancelled(make_task) -> None:
    """Whichever comes first holds; a task that is cancelled between the two ends cancelled."""
    wait = Wait(asyncio.get_running_loop())
    task = await make_task(awaited(wait))
    assert wait.settle("here")
    task.cancel()
    await on_the_loop(wait.wake)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_answered_before_it_is_awaited() -> None:
    """Then there is nothing to wait for, and nobody to wake."""
    wait = Wait(asyncio.get_running_loop())
    assert not wait.settle(1)
    assert await wait == 1


async def test_cancelled_before_its_first_wait(make_task) -> None:
    """A task that is told to stop while it runs stops where it waits next."""
    wait = Wait(asyncio.get_running_loop())

    async def waiter() -> None:
        asyncio.current_task().cancel()
        await wait

    task = await make_task(waiter())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_timeouts_work(make_task) -> None:
    """asyncio.timeout, which cancels its task, turns into TimeoutError."""
    wait = Wait(asyncio.get_running_loop())

    async def waiter() -> None:
        async with asyncio.timeout(0.001):
            await wait

    with pytest.raises(TimeoutError):
        await (await make_task(waiter()))


async def test_one_that_ends_the_loop_does_not_keep_the_others() -> None:
    """SystemExit in a step goes its way; the rest is woken in the next turn."""

    class Stubborn(Wait):
        def wake(self) -> None:
            raise SystemExit(3)

    loop = asyncio.get_running_loop()
    wait = Wait(loop)
    task = asyncio.create_task(awaited(wait))
    await asyncio.sleep(0)
    wait.settle("here")

    def step() -> None:
        with pytest.raises(SystemExit):
            wake_all([Stubborn(loop), wait], loop)

    await on_the_loop(step)
    assert await task == "here"
