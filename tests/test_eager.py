"""Coroutines that never wait, without a task of their own; and those that do."""

import asyncio
import contextvars

import actors
import pytest

from aiorpc_torch import call, create, remote
from aiorpc_torch._eager import Host
from aiorpc_torch.testing import Gate

var: contextvars.ContextVar[int] = contextvars.ContextVar("var", default=0)


@pytest.fixture
async def host():
    """One that is ready."""
    made = Host()
    await asyncio.sleep(0)
    yield made
    made.close()
    await asyncio.sleep(0)


async def run(host: Host, *coroutines) -> list[bool]:
    """Have `host` run coroutines in one callback; whether each was done at once."""
    done = asyncio.get_running_loop().create_future()

    def step() -> None:
        contexts = [contextvars.copy_context() for _ in coroutines]
        done.set_result([host.run(c, x) for c, x in zip(coroutines, contexts, strict=True)])

    asyncio.get_running_loop().call_soon(step)
    return await done


async def test_many_in_one_turn(host: Host) -> None:
    """Each in a context of its own, as the current task."""
    seen = []

    async def quick(number: int) -> None:
        seen.append((number, var.get(), asyncio.current_task()))
        var.set(number)

    assert await run(host, *(quick(n) for n in (1, 2, 3))) == [True] * 3
    assert seen == [(n, 0, host.task) for n in (1, 2, 3)]
    assert host.is_free()


async def test_one_that_waits_has_the_task_for_itself(host: Host) -> None:
    """Cancellation and timeouts reach it and nobody else; its context goes with it."""
    seen = []
    gate, timed_out = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        var.set(5)
        try:
            async with asyncio.timeout(0.001):
                await gate.wait()
        except TimeoutError:
            seen.append("timeout")
            timed_out.set()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            seen.append((var.get(), asyncio.current_task() is host.task))

    assert await run(host, slow()) == [False]
    assert not host.is_free()
    assert host.task in asyncio.all_tasks()
    await timed_out.wait()
    host.task.cancel()
    await asyncio.wait([host.task])
    assert seen == ["timeout", (5, True)]


async def test_a_host_at_rest_is_nobodys_task(host: Host) -> None:
    """Who gathers all tasks does not wait for one that waits for work."""
    assert host.task not in asyncio.all_tasks()


@pytest.mark.usefixtures("world")
class TestInAWorld:
    """What a user sees of it."""

    async def test_order_among_those_that_wait_and_those_that_do_not(self) -> None:
        """Calls start in the order in which they were sent, whatever is known of each."""
        trail = await create("main", Trail)
        for _ in range(3):
            start = await remote(trail).length()
            names = ["quick" if n % 3 else "slow" for n in range(60)]
            await asyncio.gather(*(getattr(remote(trail), m)(n) for n, m in enumerate(names)))
            assert (await remote(trail).noted())[start:] == list(range(60))

    async def test_a_cancellation_comes_before_the_next_call(self) -> None:
        """What was cancelled has seen it when a later call starts."""
        gate = await create("main", Gate)
        await remote(gate).cancelled(0)
        for count in range(1, 6):
            waiting = asyncio.create_task(remote(gate).passed())
            await remote(gate).entered(count)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert await remote(gate).cancelled(0) == count

    async def test_contexts_do_not_mix(self) -> None:
        """What a method sets is gone when the next one starts."""
        assert await asyncio.gather(*(call("main", actors.bump_context) for _ in range(20))) == (
            [1] * 20
        )

    async def test_a_stray_cancellation_costs_nobody_anything(self) -> None:
        """A method may leave its task behind for somebody to cancel later."""
        for _ in range(3):
            for task in await asyncio.gather(*(call("main", leave_task) for _ in range(3))):
                assert task is None
            for task in left:
                task.cancel()
            left.clear()


left: list[asyncio.Task] = []


async def leave_task() -> None:
    left.append(asyncio.current_task())


class Trail:
    """Notes who starts."""

    def __init__(self) -> None:
        self.order: list[int] = []

    async def quick(self, number: int) -> None:
        self.order.append(number)

    async def slow(self, number: int) -> None:
        self.order.append(number)
        await asyncio.sleep(0)

    async def length(self) -> int:
        return len(self.order)

    async def noted(self) -> list[int]:
        return self.order
