"""`timeout` blocks nest and never lengthen, whatever ends them."""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch import seconds_left, timeout

seconds = st.none() | st.floats(0.0, 1e6) | st.just(math.inf)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that a test moves; no deadline is left afterwards."""
    now = [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now
    monkeypatch.undo()
    assert seconds_left() is None


@pytest.mark.promise("deadlines.block")
def test_a_block_bounds_all_calls_in_it_together(clock: list[float]) -> None:
    """Each has what the ones before it have left, and past the end less than nothing."""
    with timeout(10.0):
        assert seconds_left() == 10.0
        clock[0] += 4.0
        assert seconds_left() == 6.0
        clock[0] += 7.0
        assert seconds_left() == -1.0
    assert seconds_left() is None


@pytest.mark.promise("deadlines.block")
@given(st.lists(seconds, max_size=6))
def test_nesting_never_lengthens(nested: list[float | None]) -> None:
    """However blocks are nested, the nearest deadline counts, and each exit restores the last."""
    now, before = 1_000.0, [seconds_left()]
    with ExitStack() as stack:
        for inner in nested:
            stack.enter_context(timeout(inner))
            before.append(seconds_left())
            known = [now + n - now for n in nested[: len(before) - 1] if n is not None]
            assert before[-1] == min(known, default=None)
    assert seconds_left() is None


def test_none_sets_no_bound_and_lifts_none() -> None:
    """`timeout(None)` leaves what is in force in force."""
    with timeout(None):
        assert seconds_left() is None
    with timeout(3.0), timeout(None):
        assert seconds_left() == 3.0


def test_the_block_ends_however_it_is_left() -> None:
    """An exception restores what was in force before, and goes its way."""
    with timeout(9.0):
        with pytest.raises(ZeroDivisionError), timeout(1.0):
            1 / 0  # noqa: B018
        assert seconds_left() == 9.0
    assert seconds_left() is None


async def test_each_task_is_in_its_own_blocks() -> None:
    """Tasks inherit what is in force where they are made, and do not see each other's."""
    entered, go = asyncio.Event(), asyncio.Event()

    async def inside() -> float | None:
        with timeout(1.0):
            entered.set()
            await go.wait()
            return seconds_left()

    async def inherits() -> float | None:
        await go.wait()
        return seconds_left()

    with timeout(5.0):
        tasks = [asyncio.create_task(inside()), asyncio.create_task(inherits())]
        await entered.wait()
        assert seconds_left() == 5.0
    assert seconds_left() is None
    go.set()
    assert await asyncio.gather(*tasks) == [1.0, 5.0]
