"""How long a call may take: a point in time here, seconds left on the wire (clocks differ)."""

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ("timeout",)

_deadline: ContextVar[float | None] = ContextVar("aiorpc_deadline", default=None)


@contextlib.contextmanager
def timeout(seconds: float | None) -> Iterator[None]:
    """Give every remote call made inside at most `seconds` from now, all together.

    What is left travels with each call and bounds the calls that it makes in turn. An enclosing
    `timeout` is never lengthened; None sets no bound of its own.

    Raises:
        CallTimeout: from the call in whose time the deadline passes, or that comes after it.
    """
    token = _deadline.set(deadline_in(seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def deadline_in(seconds: float | None) -> float | None:
    """The nearer of the deadline in force and `seconds` from now, as a `time.monotonic()`."""
    enclosing = _deadline.get()
    if seconds is None:  # mostly
        return enclosing
    own = deadline_after(seconds)
    if own is None or enclosing is None:
        return own if enclosing is None else enclosing
    return min(own, enclosing)


def budget(deadline: float | None) -> float | None:
    """Seconds left until `deadline`, negative past it."""
    return None if deadline is None else deadline - time.monotonic()


def deadline_after(seconds: float | None) -> float | None:
    """The point in time so many seconds from now, as a `time.monotonic()`."""
    return None if seconds is None else time.monotonic() + seconds


def adopt(deadline: float | None) -> None:
    """On the callee: the caller's deadline bounds everything in this context."""
    _deadline.set(deadline)
