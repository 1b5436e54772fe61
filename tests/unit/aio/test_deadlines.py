"""Deadlines: `timeout` blocks nest, never lengthen, and travel as seconds left."""

import asyncio
import contextvars
import math
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch import timeout
from aiorpc_torch._aio import deadlines
from aiorpc_torch._aio.deadlines import deadline_after, deadline_in, set_deadline, time_left

seconds = st.none() | st.floats(0.0, 1e6) | st.just(math.inf)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that a test moves; no deadline is left afterwards."""
    now = [1_000.0]
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: now[0]))
    yield now
    monkeypatch.undo()
    assert deadline_in(None) is None


def left() -> float | None:
    """What a call made here would travel with."""
    return time_left(deadline_in(None))


def test_without_any_there_is_no_end() -> None:
    """No block, no deadline; a call's own `timeout=` is the only one."""
    assert left() is None
    assert time_left(deadline_in(5.0)) == 5.0


@pytest.mark.promise("deadlines.block")
def test_a_block_bounds_all_calls_in_it_together(clock: list[float]) -> None:
    """Each has what the ones before it have left, and past the end less than nothing."""
    with timeout(10.0):
        assert left() == 10.0
        clock[0] += 4.0
        assert left() == 6.0
        clock[0] += 7.0
        assert left() == -1.0
    assert left() is None


@pytest.mark.promise("deadlines.block")
@given(st.lists(seconds, max_size=6))
def test_nesting_never_lengthens(nested: list[float | None]) -> None:
    """However blocks are nested, the nearest deadline counts, and each exit restores the last."""
    now, before = 1_000.0, [deadline_in(None)]
    with ExitStack() as stack:
        for inner in nested:
            stack.enter_context(timeout(inner))
            before.append(deadline_in(None))
            known = [now + n for n in nested[: len(before) - 1] if n is not None]
            assert before[-1] == min(known, default=None)
    assert deadline_in(None) is None


@given(seconds, seconds)
def test_a_calls_own_timeout_only_shortens(block: float | None, own: float | None) -> None:
    """`remote(r, timeout=...)` inside a block is bounded by both."""
    given_ = [n for n in (block, own) if n is not None]
    with timeout(block):
        left = time_left(deadline_in(own))
    assert left == pytest.approx(min(given_)) if given_ else left is None


def test_none_sets_no_bound_and_lifts_none() -> None:
    """`timeout(None)` leaves what is in force in force."""
    with timeout(None):
        assert left() is None
    with timeout(3.0), timeout(None):
        assert left() == 3.0


def test_the_block_ends_however_it_is_left() -> None:
    """An exception restores what was in force before, and goes its way."""
    with timeout(9.0):
        with pytest.raises(ZeroDivisionError), timeout(1.0):
            1 / 0  # noqa: B018
        assert left() == 9.0
    assert left() is None


def test_it_travels_as_seconds_left(clock: list[float]) -> None:
    """Clocks of two machines differ: the callee counts what is left from its own now."""
    with timeout(8.0):
        clock[0] += 3.0
        travels = left()

    def callee() -> list[float | None]:
        clock[0] = 77.0
        set_deadline(deadline_after(travels))
        seen = [left()]
        clock[0] += 2.0
        with timeout(60.0):
            seen.append(left())
        with timeout(1.0):
            seen.append(left())
        return seen

    assert contextvars.Context().run(callee) == [5.0, 3.0, 1.0]
    assert left() is None


def test_a_caller_without_a_deadline_gives_none(clock: list[float]) -> None:
    """The callee has no deadline for this call, even if it had one before."""

    def callee() -> float | None:
        set_deadline(deadline_after(2.0))
        set_deadline(deadline_after(None))
        return left()

    assert contextvars.Context().run(callee) is None


async def test_each_task_is_in_its_own_blocks() -> None:
    """Tasks inherit what is in force where they are made, and do not see each other's."""
    entered, go = asyncio.Event(), asyncio.Event()

    async def inside() -> float | None:
        with timeout(1.0):
            entered.set()
            await go.wait()
            return left()

    async def inherits() -> float | None:
        await go.wait()
        return left()

    with timeout(5.0):
        tasks = [asyncio.create_task(inside()), asyncio.create_task(inherits())]
        await entered.wait()
        assert left() == 5.0
    assert left() is None
    go.set()
    assert await asyncio.gather(*tasks) == [1.0, 5.0]
