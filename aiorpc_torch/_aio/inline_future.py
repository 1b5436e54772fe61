"""What a task waits for, woken in the very turn of the loop that brings the answer.

An `asyncio.Future` wakes its task by way of `call_soon`: a handle, and a turn of the loop more,
which is 15 µs of a lone call. Here whoever brings the answer takes the task's next step. asyncio
asks no more of what a coroutine yields to its task than the few methods below (CPython 3.11 on;
tests/test_wait.py).
"""

import asyncio
import contextvars
from collections.abc import Callable, Generator, Iterable
from typing import Any

Step = Callable[["Wait"], object]


class Wait:
    """One task's waiting, for one answer. Confined to its loop."""

    __slots__ = (
        "_answer",
        "_asyncio_future_blocking",
        "_context",
        "_loop",
        "_state",
        "_step",
        "target",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._state = "waiting"
        self._answer: Any = None
        self._step: Step | None = None
        self._asyncio_future_blocking = False
        self.target: Any = None  # of the call whose answer it is

    def __repr__(self) -> str:
        return f"<Wait {self._state}>"

    def settle(self, answer: Any) -> bool:
        """Here is the answer; True if its task is to be woken, with `wake`."""
        if self._state != "waiting":
            return False
        self._state = "answered"
        self._answer = answer
        return self._step is not None

    def wake(self) -> None:
        """Take the task's next step. On the loop, outside any task."""
        step, self._step = self._step, None
        if step is not None:
            self._context.run(step, self)

    def __await__(self) -> Generator[Any, None, Any]:
        if self._state == "waiting":
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    # ── what a task asks of it ──────────────────────────────────────────────────────────────────

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Whose it is."""
        return self._loop

    def add_done_callback(self, step: Step, *, context: contextvars.Context) -> None:
        """How to go on."""
        self._step = step
        self._context = context

    def cancel(self, msg: Any = None) -> bool:
        """The task is cancelled: it goes on with that, in the next turn."""
        if self._state != "waiting":
            return False
        self._state = "cancelled"
        self._answer = msg
        self._loop.call_soon(self.wake)
        return True

    def result(self) -> Any:
        """The answer, or the cancellation."""
        if self._state == "cancelled":
            # anyio's scopes know their own cancellations by the message.
            raise asyncio.CancelledError(*([] if self._answer is None else [self._answer]))
        return self._answer


def wake_all(waits: Iterable[Wait], loop: asyncio.AbstractEventLoop) -> None:
    """Wake each. What ends the loop in one of them, `SystemExit` say, does not keep the others."""
    rest = iter(waits)
    try:
        for wait in rest:
            wait.wake()
    finally:
        for wait in rest:
            loop.call_soon(wait.wake)
