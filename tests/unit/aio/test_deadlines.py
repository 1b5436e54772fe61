"""Deadlines of calls: their own only shortens, and they travel as seconds left."""

import contextvars
import math
from collections.abc import Iterator
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


@given(seconds, seconds)
def test_a_calls_own_timeout_only_shortens(block: float | None, own: float | None) -> None:
    """`remote(r, timeout=...)` inside a block is bounded by both."""
    given_ = [n for n in (block, own) if n is not None]
    with timeout(block):
        left = time_left(deadline_in(own))
    assert left == pytest.approx(min(given_)) if given_ else left is None


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
