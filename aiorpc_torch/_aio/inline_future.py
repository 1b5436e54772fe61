"""A future whose task continues in the same event-loop iteration that brings the result.

An `asyncio.Future` resumes its task with `call_soon`, an iteration later: 15 µs of a lone call.
Here the code that has the result runs the task's next step itself.
"""

import asyncio
import contextvars
from collections.abc import Callable, Generator, Iterable
from typing import Any

Step = Callable[["InlineFuture"], object]


class InlineFuture:
    """A result that one task awaits, for use on its event loop only.

    `asyncio.Task` accepts what has these methods and `_asyncio_future_blocking`, a private
    interface of CPython 3.11 to 3.14. (With the C and the Python task:
    tests/unit/aio/test_inline_future.py)
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_context",
        "_loop",
        "_state",
        "_step",
        "answer",  # the result, once it is set
        "event",  # of a profiler that records the call, until its result; else not set
        "source",  # the target of the call as the caller named it
        "started",  # `time.monotonic()` of the call
        "target",  # as encoded
    )

    answer: Any
    event: Any
    source: Any
    started: float
    target: Any

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._state = "waiting"
        self._step: Step | None = None
        self._asyncio_future_blocking = True  # a task that is given it may wait

    def __repr__(self) -> str:
        return f"<InlineFuture {self._state}>"

    def set_result(self, result: Any) -> bool:
        """Set the result; return whether a task waits for it and is to be resumed."""
        if self._state != "waiting":
            return False
        self._state = "done"
        self.answer = result
        self.event = None  # before the caller goes on, and perhaps stops the profiler
        return self._step is not None

    def resume(self) -> None:
        """Run the next step of the waiting task. Call it outside any task."""
        step, self._step = self._step, None
        if step is not None:
            self._context.run(step, self)

    def __await__(self) -> Generator[Any, None, Any]:
        if self._state == "waiting":
            self._asyncio_future_blocking = True
            yield self
        return self.result() if self._state == "cancelled" else self.answer

    # ── called by asyncio.Task ──────────────────────────────────────────────────────────────────

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the waiting task."""
        return self._loop

    def add_done_callback(self, step: Step, *, context: contextvars.Context) -> None:
        """Keep the next step of the task for `resume`; a future that is done resumes it soon."""
        self._step = step
        self._context = context
        if self._state != "waiting":  # `resume` was called already, and has found no step
            self._loop.call_soon(self.resume)

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the wait; the task resumes in the next iteration of the loop."""
        if self._state != "waiting":
            return False
        self._state = "cancelled"
        self.answer = msg
        self.event = None
        self._loop.call_soon(self.resume)
        return True

    def result(self) -> Any:
        """Return the result, or raise CancelledError."""
        if self._state == "cancelled":
            # anyio's scopes recognize their own cancellations by the message.
            raise asyncio.CancelledError(*([] if self.answer is None else [self.answer]))
        return self.answer


def resume_all(futures: Iterable[InlineFuture], loop: asyncio.AbstractEventLoop) -> None:
    """Resume the tasks of all futures, also if one raises (SystemExit, say)."""
    rest = iter(futures)
    try:
        for future in rest:
            future.resume()
    finally:
        for future in rest:
            loop.call_soon(future.resume)
