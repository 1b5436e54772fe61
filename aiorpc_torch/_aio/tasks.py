"""Drivers of coroutines, step by step, and the release of tasks that do not end."""

import asyncio
import contextvars
import logging
import sys
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import anyio

R = TypeVar("R")

log = logging.getLogger("aiorpc_torch")

SLOW_STEP = 0.1  # seconds of one step, in which the event loop serves nothing else

slow_steps: dict[str, tuple[int, float]] = {}
"""The number of such steps of this process and the seconds of the longest, by coroutine."""


@types.coroutine
def warn_if_blocking(coroutine: Coroutine[Any, Any, R], name: str) -> Generator[Any, Any, R]:
    """Await `coroutine`; log a warning for each step that blocks the loop for over `SLOW_STEP`."""
    step, value = coroutine.send, None
    while True:
        start = perf_counter()
        try:
            waits_for = step(value)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            if (seconds := perf_counter() - start) > SLOW_STEP:
                number, longest = slow_steps.get(name, (0, 0.0))
                slow_steps[name] = number + 1, max(seconds, longest)
                log.warning(
                    "%s held the event loop for %.2f s: nothing else was served meanwhile. "
                    "A plain `def` would run in a thread",
                    name,
                    seconds,
                )
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
            # An anyio scope cancels again and again: once is enough.
            with anyio.CancelScope(shield=interrupted):
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
