"""Deadlines of calls: `time.monotonic()` in a process, seconds left on the wire (clocks differ).

The deadline of the anyio scopes around a call travels with it as that of `timeout` does. On the
caller the scope enforces it by cancelling, so it never is the call's own deadline.
"""

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from numbers import Real
from typing import Any

import anyio

_deadline: ContextVar[float | None] = ContextVar("aiorpc_deadline", default=None)

current_deadline = _deadline.get
"""Return the current deadline, None without one. A function of C: every call asks."""


@contextlib.contextmanager
def timeout(seconds: float | None) -> Iterator[None]:
    """Bound all remote calls made inside, together, to `seconds` from now.

    The time left travels with each call and bounds the calls that the callee makes. An enclosing
    `timeout` is never lengthened; None sets no further bound.

    Raises:
        TypeError: if `seconds` is not a number.
        CallTimeout: from the call that the deadline interrupts, and from each call made after it.
    """
    token = _deadline.set(deadline_in(checked_timeout(seconds)))
    try:
        yield
    finally:
        _deadline.reset(token)


def checked_timeout(timeout: Any) -> float | None:
    """Return a timeout that a user gave, as a float.

    Raises:
        TypeError: if it is not a number, or NaN.
    """
    if timeout is None:
        return None
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if is_number and timeout == timeout:  # not NaN
        return float(timeout)
    raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")


def deadline_in(seconds: float | None) -> float | None:
    """Return the earlier of the current deadline and `seconds` from now."""
    enclosing = _deadline.get()
    return enclosing if seconds is None else earlier(deadline_after(seconds), enclosing)


def earlier(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two deadlines, of which None is none."""
    return one if other is None else other if one is None else min(one, other)


def time_left(deadline: float | None) -> float | None:
    """Return the seconds until `deadline`, negative after it."""
    return None if deadline is None else deadline - time.monotonic()


def deadline_after(seconds: float | None) -> float | None:
    """Return `seconds` from now as a `time.monotonic()`, whatever the current deadline is."""
    return None if seconds is None else time.monotonic() + seconds


def seconds_left() -> float | None:
    """Return the seconds until the deadline of `timeout`, or of the caller; None without one.

    Code that waits for something else than a remote call keeps the deadline with it:
    `async with asyncio.timeout(aiorpc.seconds_left())`. It is negative after the deadline.
    """
    return time_left(_deadline.get())


def set_deadline(deadline: float | None) -> None:
    """Set the deadline of the current context, on the callee: the caller's."""
    _deadline.set(deadline)


def in_seconds(seconds: float) -> str:
    """Return a time limit as text for errors."""
    return f"{round(seconds, 2) or seconds:.3g} s"


# ── scopes of anyio ─────────────────────────────────────────────────────────────────────────────

# The first scope of a process imports anyio's private asyncio backend. While it is not imported
# there is no scope, and no need to ask, which takes 2.5 µs.
# (tests/loopback/test_deadlines.py::test_callee_sees_the_time_left)
ANYIO_BACKEND = "anyio._backends._asyncio"


def anyio_scope_deadline() -> float | None:
    """Return when the scopes around this task end as a `time.monotonic()`, None if never."""
    if ANYIO_BACKEND not in sys.modules:
        return None
    deadline = anyio.current_effective_deadline()
    if not math.isfinite(deadline):  # no deadline, or a scope that is cancelled already
        return None
    return time.monotonic() + deadline - asyncio.get_running_loop().time()
