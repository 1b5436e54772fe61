"""Deadlines of calls: `time.monotonic()` in a process, seconds left on the wire (clocks differ).

The deadline of the anyio scopes around a call travels with it as that of `timeout` does. On the
caller the scope enforces it by cancelling, so it never is the call's own deadline.
"""

import asyncio
import contextvars
import math
import sys
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from numbers import Real
from typing import Any, cast

import anyio

_deadline: ContextVar[float | None] = ContextVar("aiorpc_deadline", default=None)

current_deadline = _deadline.get
"""Return the current deadline, None without one. A function of C: every call asks.

It may be void: `deadline_in` knows.
"""


LATER = 0.002
"""Seconds from a deadline until its block ends: uvloop rounds the timers inside to milliseconds."""

ITERATIONS = 8
"""Iterations of the event loop from then until the block is cancelled.

A call inside ends at the deadline with CallTimeout, by a timer of its own, and its block goes on
some iterations later: three after a call of a group, four if it is in a task of a TaskGroup. Only
what waits on is cancelled. (tests/loopback/test_timeouts.py)
"""


NOTICE = 0.5
"""Seconds before its deadline at which it is asked where a call stands, a fifth of them at most."""

SHORTEST = 0.05  # seconds of the deadlines before which nothing is asked


def notice_of(seconds: float) -> float:
    """Return how long before a deadline, `seconds` from now, it is asked where its calls stand."""
    return min(NOTICE, seconds / 5) if seconds >= SHORTEST else 0.0


class timeout:  # noqa: N801 - a context manager, as `asyncio.timeout`
    """Bound a block, and all remote calls made inside together, to `seconds` from now.

        with aiorpc.timeout(5.0):        # or `async with`
            x = await aiorpc.remote(model).infer(x)
            await asyncio.sleep(1.0)

    A call that the deadline interrupts raises `CallTimeout`. Any other wait is cancelled, and the
    block raises TimeoutError, its base. The time left travels with each call and bounds the calls
    that the callee makes. An enclosing `timeout` is never lengthened. Tasks that are created inside
    keep the deadline for their calls. In a thread without an event loop it bounds remote calls.

    Args:
        seconds: time for the block; None sets no further bound. 0 is over at once: no call is sent.

    Raises:
        TypeError: if `seconds` is not a number.
        CallTimeout: from the call that the deadline interrupts, and from each call made after it.
        TimeoutError: from the block, if something else was interrupted.
    """

    __slots__ = ("_cancelling", "_due", "_handle", "_is_over", "_seconds", "_token")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = checked_timeout(seconds)
        if not isinstance(seconds, float):  # a time left that is 0.0 was computed
            _warn_of_zero(seconds, 3)
        self._token: contextvars.Token[float | None] | None = None
        self._due: _BlockDeadline | None = None  # while the block lasts, in a task
        self._handle: asyncio.Handle | None = None
        self._is_over = False

    def __repr__(self) -> str:
        return f"timeout({self._seconds!r})"

    def __enter__(self) -> None:
        if self._token is not None:
            raise RuntimeError(f"{self!r} was entered already: make a new one")
        due = deadline_in(self._seconds)
        if self._seconds is not None and due is not None and due != math.inf:
            loop = asyncio._get_running_loop()
            if loop is not None and (task := asyncio.current_task(loop)) is not None:
                self._cancelling = task.cancelling()
                self._due = due = _BlockDeadline(due)
                due.task, due.call, due.is_void = task, None, False
                due.enclosing = _deadline.get()
                left = due - time.monotonic()
                self._handle = loop.call_later(left - notice_of(left), self._foresee, loop)
        self._token = _deadline.set(due)

    def _foresee(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._due is not None
        self._handle = loop.call_later(self._due + LATER - time.monotonic(), self._expire, loop)
        if self._due.call is not None:
            foresee, _, args = self._due.call
            foresee(*args)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._due is not None and self._due.call is not None:
            _, expire, args = self._due.call
            expire(*args)
        self._count_down(loop, ITERATIONS)

    def _count_down(self, loop: asyncio.AbstractEventLoop, left: int) -> None:
        if left:
            self._handle = loop.call_soon(self._count_down, loop, left - 1)
            return
        assert self._due is not None
        assert self._due.task is not None
        self._handle, self._is_over = None, True
        self._due.task.cancel()

    def __exit__(self, kind: type[BaseException] | None, exc: object, _: object) -> None:
        assert self._token is not None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        task, due, self._due = None, self._due, None
        if due is not None:  # tasks that were created inside keep the deadline, and not this task
            task, due.task = due.task, None
        try:
            _deadline.reset(self._token)
        except ValueError:  # entered in another context, as a generator that is left by `break`
            if due is not None:
                due.is_void = True
        if task is None or not self._is_over:
            return
        is_own = task.uncancel() <= self._cancelling
        if is_own and kind is not None and issubclass(kind, asyncio.CancelledError):
            text = f"the block was not over within {in_seconds(self._seconds or 0.0)}"
            raise TimeoutError(text) from cast(BaseException, exc)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, exc: object, trace: object) -> None:
        self.__exit__(kind, exc, trace)


class _BlockDeadline(float):
    """The deadline of a block, which may be that of an enclosing one."""

    __slots__ = ("call", "enclosing", "is_void", "task")

    task: asyncio.Task[Any] | None  # of the block, None when it is over
    # Of the call that the task waits for: what asks where it stands, before the deadline, what ends
    # it at the deadline, and their arguments.
    call: tuple[Callable[..., object], Callable[..., object], Any] | None
    enclosing: float | None  # the deadline around the block
    is_void: bool  # True once the block was left in another context, where it cannot be reset

    def cancel(self) -> None:
        """Forget the call: it has ended."""
        self.call = None


def _found_deadline() -> float | None:
    """Return the current deadline, of a block that lasts or was left in order."""
    due = _deadline.get()
    while type(due) is _BlockDeadline and due.is_void:
        due = due.enclosing
    return due


def call_at(
    due: float,
    seconds: float,
    foresee: Callable[..., object],
    expire: Callable[..., object],
    *args: Any,
) -> "asyncio.TimerHandle | ForeseenTimer | _BlockDeadline":
    """Call `foresee` shortly before a deadline, `seconds` from now, and `expire` at it.

    For the call that the current task waits for; `expire` ignores one that has ended. A task that
    is inside of the block whose deadline it is needs no further timer.
    """
    loop = asyncio.get_running_loop()
    if type(due) is _BlockDeadline and due.task is asyncio.current_task(loop) and not due.call:
        due.call = foresee, expire, args
        return due
    if not notice_of(seconds):
        return loop.call_later(seconds, expire, *args)
    return ForeseenTimer(seconds, lambda _: foresee(*args), lambda _: expire(*args))


class ForeseenTimer:
    """A timer of the running loop: `foresee(seconds)` shortly before, `expire(seconds)` at its end.

    The first asks where calls stand, the second ends them.
    """

    __slots__ = ("_due", "_expire", "_foresee", "_handle", "_seconds")

    def __init__(
        self,
        seconds: float,
        foresee: Callable[[float], object],
        expire: Callable[[float], object],
    ) -> None:
        self._seconds, self._foresee, self._expire = seconds, foresee, expire
        self._due = time.monotonic() + seconds
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(seconds - notice_of(seconds), self._on_notice)

    def _on_notice(self) -> None:
        left = self._due - time.monotonic()
        self._handle = asyncio.get_running_loop().call_later(left, self._expire, self._seconds)
        if notice_of(self._seconds):
            self._foresee(self._seconds)

    def cancel(self) -> None:
        """End the timer."""
        self._handle.cancel()


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


def checked_call_timeout(timeout: Any) -> float | None:
    """Return the timeout of calls, as `checked_timeout`; warn of torch's value for none."""
    seconds = checked_timeout(timeout)
    _warn_of_zero(timeout, 4)
    return seconds


def _warn_of_zero(timeout: Any, stacklevel: int) -> None:
    if timeout in (0, -1):
        warnings.warn(
            f"timeout={timeout!r} is over at once: no call is sent. Unlike torch RPC, this library "
            "takes None for no timeout",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


def deadline_in(seconds: float | None) -> float | None:
    """Return the earlier of the current deadline and `seconds` from now."""
    enclosing = _found_deadline()
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
    return time_left(_found_deadline())


set_deadline = _deadline.set
"""Set the deadline of the current context, on the callee: the caller's."""


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
