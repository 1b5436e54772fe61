"""Steps of tasks that do not wait for another iteration of the event loop, and the ends of tasks.

An `asyncio.Future` resumes its task with `call_soon`, an iteration later: 15 µs of a lone call.
With an `InlineFuture` the code that has the result runs the task's next step itself. `start_task`
takes a task's first step at once.
"""

import asyncio
import contextlib
import contextvars
import logging
import sys
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import anyio

from . import fork
from .slow_steps import note_slow_step

R = TypeVar("R")

log = logging.getLogger("aiorpc_torch")

SLOW_STEP = 0.1  # seconds of one step, in which the event loop serves nothing else


@types.coroutine
def warn_if_blocking(coroutine: Coroutine[Any, Any, R], name: str) -> Generator[Any, Any, R]:
    """Await `coroutine`; warn of steps that block the loop for over `SLOW_STEP`, once a minute.

    A fork that a worker makes in a step ends with that step.
    """
    step, value = coroutine.send, None
    while True:
        start, generation = perf_counter(), fork.generation
        try:
            waits_for = step(value)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        except BaseException as exc:
            fork.end_fork_since(generation, exc)
            raise
        finally:
            if fork.generation != generation:
                fork.end_fork_since(generation)
            if (seconds := perf_counter() - start) > SLOW_STEP:
                note_slow_step(name, seconds, start + seconds)
        try:
            step, value = coroutine.send, (yield waits_for)
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as exc:
            step, value = coroutine.throw, exc


@dataclass(eq=False)
class StepContext(Generator[Any, Any, R]):
    """An awaitable that runs each step of `coroutine` inside `enter()`.

    It is for state of the thread, which other tasks must not see between the steps.
    """

    enter: Callable[[], AbstractContextManager[None]]
    coroutine: Coroutine[Any, Any, R]

    def __await__(self) -> Generator[Any, Any, R]:
        return self

    def send(self, value: Any) -> Any:
        """Run the next step."""
        with self.enter():
            return self.coroutine.send(value)

    def throw(self, *exc: Any) -> Any:
        """Run the next step with an exception."""
        with self.enter():
            return self.coroutine.throw(*exc)


def start_task(
    coroutine: Coroutine[Any, Any, R],
    loop: asyncio.AbstractEventLoop,
    name: str,
    context: contextvars.Context,
) -> "asyncio.Task[R]":
    """Return a task of `coroutine` that has taken its first step, if the loop permits it.

    A coroutine that never waits then needs no loop iteration. Call it on the running `loop`.
    (To drive a coroutine without a task would break `asyncio.timeout` in it.)
    """
    if sys.version_info >= (3, 12):
        return asyncio.Task(coroutine, loop=loop, name=name, context=context, eager_start=True)
    task = asyncio.Task(coroutine, loop=loop, name=name, context=context)
    # Python 3.11 has scheduled the step, last in a queue that is private to asyncio's loops. Other
    # threads may have added to it since; uvloop's is hidden. A task cannot step inside another's.
    ready: Any = getattr(loop, "_ready", None)
    if ready and asyncio.current_task(loop) is None:
        step = (handle := ready.pop())._callback
        if getattr(step, "__self__", None) is task:
            context.run(step)
        else:
            ready.append(handle)
    return task


async def run_to_end(
    closing: "asyncio.Task[None]", on_cancel: Callable[[], object] = lambda: None
) -> None:
    """Wait until `closing` has ended; a cancellation of this only calls `on_cancel`."""
    interrupted = False
    while not closing.done():
        try:
            # An anyio scope cancels again and again: once is enough. Without a need no scope: each
            # later call of a task that has had one takes a microsecond longer to see its deadline.
            with anyio.CancelScope(shield=True) if interrupted else contextlib.nullcontext():
                await asyncio.wait((closing,))
        except asyncio.CancelledError:
            interrupted = True
            on_cancel()
    closing.result()
    if interrupted:
        raise asyncio.CancelledError


def detach_task(task: "asyncio.Task[Any]", name: str) -> None:
    """Log that a cancelled task does not end, and let the event loop close without it.

    `asyncio.run` waits until every task that it knows has ended. One coroutine that ignores its
    cancellation would keep the process alive. Both names below are private to CPython (3.11 to
    3.14; tests/integration/test_worlds.py::test_what_never_returns_does_not_keep_a_process).
    """
    log.warning("%s did not end when its worker stopped", name)
    asyncio.tasks._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is logged above


# ── futures that resume their task at once ────────────────────────────────────────────────────────


Step = Callable[["InlineFuture"], object]


class InlineFuture:
    """A result that one task awaits, for use on its event loop only.

    `asyncio.Task` accepts what has these methods and `_asyncio_future_blocking`, a private
    interface of CPython 3.11 to 3.14. (With the C and the Python task:
    tests/unit/aio/test_tasks.py)
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_context",
        "_loop",
        "_state",
        "_step",
        "answer",  # the result, once it is set
        "connection",  # over which the call is sent
        "event",  # of a profiler that records the call, until its result; else not set
        "number",  # of the call there
        "source",  # the target of the call as the caller named it
        "started",  # `time.monotonic()` of the call
        "target",  # as encoded
    )

    answer: Any
    connection: Any
    event: Any
    number: int
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
