"""Deadlines as they travel: what is left of a caller's time bounds what others do for it."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, call, create, remote
from aiorpc_torch.testing import Gate
from tests.support import actors
from tests.support.actors import Counter, Sleeper
from tests.support.slack import BEGUN

pytestmark = pytest.mark.usefixtures("world")


def scope_until(seconds: float) -> anyio.CancelScope:
    """A scope whose deadline is set after its start."""
    scope = anyio.CancelScope()
    scope.deadline = anyio.current_time() + seconds
    return scope


SCOPES = [anyio.fail_after, anyio.move_on_after, scope_until, aiorpc.timeout]
scopes = pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: scope.__name__)


async def left_there() -> float | None:
    """Seconds left, as a callee sees it."""
    return await call("main", actors.remaining)


# ── as time left ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("deadlines.nested")
@scopes
async def test_callee_sees_the_time_left(scope: Callable[[float], Any]) -> None:
    """Whatever bounds the caller bounds the callee, and it is less there; outside nothing does."""
    with scope(1000.0):
        left = await left_there()
    assert left is not None
    assert 900.0 < left < 1000.0
    assert await left_there() is None


@scopes
async def test_time_left_of_a_stream(scope: Callable[[float], Any]) -> None:
    """A generator sees it too."""
    with scope(1000.0):
        (left,) = [left async for left in call("main", yield_remaining)]
    assert 900.0 < left < 1000.0
    rref = await create("main", Seer)
    (left,) = [left async for left in remote(rref, timeout=1000.0).look()]
    assert 900.0 < left < 1000.0


async def yield_remaining() -> Any:
    yield await actors.remaining()


class Seer:
    async def look(self) -> Any:
        yield await actors.remaining()


@scopes
async def test_a_def_sees_it(scope: Callable[[float], Any]) -> None:
    """In its thread."""
    with scope(1000.0):
        left = await call("main", remaining_in_thread)
    assert left is not None
    assert 900.0 < left < 1000.0


def remaining_in_thread() -> float | None:
    return aiorpc.seconds_left()


async def test_scope_without_a_deadline() -> None:
    """Bounds nothing."""
    with anyio.CancelScope():
        assert await left_there() is None


@pytest.mark.promise("deadlines.scopes")
async def test_the_nearest_counts() -> None:
    """Of scopes in scopes, and of scopes and timeouts, wherever each stands."""
    bounds = [anyio.fail_after, aiorpc.timeout]
    for outer in bounds:
        for inner in bounds:
            for seconds in ((1000.0, 9000.0), (9000.0, 1000.0)):
                with outer(seconds[0]), inner(seconds[1]):
                    left = await left_there()
                assert left is not None
                assert 900.0 < left < 1000.0, (outer, inner, seconds)
    rref = await create("main", Seer)
    with anyio.fail_after(10000.0):
        (left,) = [left async for left in remote(rref, timeout=1000.0).look()]
        assert 900.0 < left < 1000.0
        (left,) = [left async for left in remote(rref, timeout=20000.0).look()]
        assert 9000.0 < left < 10000.0


async def test_a_shield_keeps_it_off() -> None:
    """What a scope does not cancel, it does not bound."""
    with anyio.fail_after(1000.0), anyio.CancelScope(shield=True):
        assert await left_there() is None


async def test_a_deadline_that_is_moved() -> None:
    """A call has what is left when it is made."""
    with anyio.move_on_after(1000.0) as scope:
        scope.deadline += 9000.0
        left = await left_there()
    assert left is not None
    assert 9900.0 < left < 10000.0


@pytest.mark.promise("deadlines.nested")
async def test_it_shrinks_from_hop_to_hop() -> None:
    """A callee's own calls have what is left of the first caller's time."""
    with anyio.fail_after(1000.0):
        lefts = await call("main", actors.remaining_along, "main", "main")
    assert lefts == sorted(lefts, reverse=True)
    assert len(set(lefts)) == 3
    assert all(900.0 < left < 1000.0 for left in lefts)


# ── what happens when it is over ────────────────────────────────────────────────────────────────


@pytest.mark.promise("deadlines.scopes")
async def test_move_on_after_is_silent() -> None:
    """The scope ends, the remote coroutine is cancelled, nothing is raised."""
    gate = await create("main", Gate)
    with anyio.move_on_after(BEGUN) as scope:
        await remote(gate).passed()
    assert scope.cancelled_caught
    assert await remote(gate).cancelled() == 1


@pytest.mark.promise("deadlines.scopes")
async def test_fail_after_raises_its_own() -> None:
    """TimeoutError, and not the CallTimeout of a call's own deadline."""
    gate = await create("main", Gate)
    with pytest.raises(TimeoutError) as raised, anyio.fail_after(BEGUN):
        await remote(gate).passed()
    assert type(raised.value) is TimeoutError
    assert await remote(gate).cancelled() == 1


async def test_a_scope_that_is_cancelled() -> None:
    """As any await: the call ends, and what it runs too."""
    gate = await create("main", Gate)
    with anyio.CancelScope() as scope:
        waiting = asyncio.create_task(remote(gate).passed())
        await remote(gate).entered()
        scope.cancel()
        await waiting
    assert scope.cancelled_caught
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert await remote(gate).cancelled() == 1


async def test_own_deadline_within_a_scope() -> None:
    """Whichever is nearer says what happens."""
    gate = await create("main", Gate)
    with anyio.move_on_after(1000.0) as scope, pytest.raises(CallTimeout):
        await remote(gate, timeout=0.05).passed()
    assert not scope.cancelled_caught
    with anyio.move_on_after(BEGUN) as scope:
        await remote(gate, timeout=1000.0).passed()
    assert scope.cancelled_caught


async def test_a_hop_ends_with_the_first_callers_time() -> None:
    """A nested call without a timeout is bounded, and its coroutine is cancelled."""
    gate = await create("main", Gate)
    with anyio.move_on_after(BEGUN) as scope:
        await call("main", actors.call_on, gate, "passed")
    assert scope.cancelled_caught
    assert await remote(gate).cancelled() == 1


class TestOneThread:
    """A world of its own."""

    @pytest.fixture
    def world(self) -> None:
        """None."""

    @pytest.mark.promise("deadlines.late")
    async def test_a_late_def_is_not_started(self, tmp_path) -> None:
        """What waits for a thread until its time is over never runs."""
        release = tmp_path / "release"
        async with aiorpc.local_world(0, threads=1):
            sleeper, counter = await create("main", Sleeper), await create("main", Counter)
            blocked = asyncio.create_task(remote(sleeper).block(str(release)))
            await asyncio.sleep(0)  # it is sent: whatever follows is behind it
            with pytest.raises(CallTimeout):
                await remote(counter, timeout=0.1).add()
            with anyio.move_on_after(0.1) as scope:
                await remote(counter).add()
            assert scope.cancelled_caught
            release.touch()
            await blocked
            assert await remote(counter).add(0) == 0, "neither of the two ran"

    async def test_a_scope_around_a_world(self) -> None:
        """A scope cancels each further await; its world is left all the same, and torch stopped."""
        with anyio.CancelScope() as scope:
            async with aiorpc.local_world(0):
                scope.cancel()
                await asyncio.Event().wait()
        assert scope.cancelled_caught
        async with aiorpc.local_world(0) as me:
            assert await call(me.name, int, "3") == 3


async def test_the_seconds_that_are_left(world: aiorpc.types.Worker) -> None:
    """Of the nearest deadline, here and at the callee."""

    async def left() -> float | None:
        return aiorpc.seconds_left()

    assert await aiorpc.call("main", aiorpc.seconds_left) is None
    with aiorpc.timeout(100.0):
        with aiorpc.timeout(200.0):
            assert 0 < (await left() or 0) <= 100
        assert 0 < (await aiorpc.call("main", aiorpc.seconds_left) or 0) <= 100
    with aiorpc.timeout(0.0):
        assert (await left() or 0) <= 0
    assert aiorpc.seconds_left() is None
