"""Waiting for a condition, in line or all at once, within the deadline of `aiorpc.timeout`.

Who waits in a `Line` is served in the order of arrival, and a cancelled wait serves the next. Both
are confined to one event loop. (tests/unit/training/test_waiting.py)
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from .. import CallTimeout, seconds_left

F = TypeVar("F", bound=Callable[..., Any])


def ends_at_leave(function: F) -> F:
    """Let calls that wait end at once, with WorkerLeft, as their worker leaves.

    Nothing more can come, and they would hold up `me.leave()` for its `stop_timeout`. A context
    manager waits until it is entered.
    """
    is_manager = hasattr(function, "__wrapped__")
    vars(function)["__aiorpc_waits__"] = "for an item" if is_manager else "always"  # for the server
    return function


def idles(function: F) -> F:
    """Let calls that wait for long be no reason for a warning: they wait for the next version."""
    vars(function)["__aiorpc_idles__"] = True  # for the server
    return function


async def _bounded(
    future: "asyncio.Future[None]", what: str, state: Callable[[], str] | None
) -> None:
    """Wait for a future until the deadline, and raise CallTimeout then."""
    try:
        async with asyncio.timeout(seconds_left()) as scope:
            await future
    except TimeoutError:
        if not scope.expired():
            raise
        why = "" if state is None else f": {state()}"
        text = f"{what} timed out; nothing was changed{why}"
        raise CallTimeout(text, may_have_run=False) from None


class Changes:
    """A condition that many tasks wait for: each looks again at every `notify`."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def until(
        self, is_true: Callable[[], bool], what: str, state: Callable[[], str] | None = None
    ) -> None:
        """Wait until `is_true()`. In a CallTimeout `what` names the wait, and `state` tells why."""
        while not is_true():
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await _bounded(future, what, state)
            finally:
                self._waiting.discard(future)

    def notify(self) -> None:
        """Let all tasks look again."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class Line:
    """Tasks that wait for their turn, in the order of arrival."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        """Return the number of tasks that wait."""
        return len(self._waiting)

    async def turn(
        self, is_ready: Callable[[], bool], what: str, state: Callable[[], str] | None = None
    ) -> None:
        """Wait until this task is the first and `is_ready()`. It goes on in the same step."""
        if not self._waiting and is_ready():
            return
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append(future)
        try:
            while self._waiting[0] is not future or not is_ready():
                await _bounded(future, what, state)
                done, future = future, loop.create_future()
                self._waiting[self._waiting.index(done)] = future
        finally:
            self._waiting.remove(future)
            self.notify()

    def notify(self) -> None:
        """Let the first task look again."""
        if self._waiting and not self._waiting[0].done():
            self._waiting[0].set_result(None)
