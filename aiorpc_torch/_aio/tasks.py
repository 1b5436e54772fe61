"""Steps of tasks: their duration, a first one that is taken at once. And the ends of tasks."""

import asyncio
import contextlib
import contextvars
import logging
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import anyio

from . import fork
from .slow_steps import note_slow_step

R = TypeVar("R")

log = logging.getLogger("aiorpc_torch")

SLOW_STEP = 0.1  # seconds of one step, in which the event loop serves nothing else


def take_step(step: Callable[[Any], Any], value: Any, name: str) -> tuple[bool, Any]:
    """Take one step of a coroutine: its `send` or `throw`, with a value.

    Return whether it has ended, and what it returns or waits for. Warn of a step that blocks the
    loop for over `SLOW_STEP`, once a minute. A fork that a worker makes in it ends with it.
    """
    start, generation = perf_counter(), fork.generation
    try:
        return False, step(value)
    except StopIteration as stop:
        return True, stop.value
    except BaseException as exc:
        fork.end_fork_since(generation, exc)
        raise
    finally:
        if fork.generation != generation:
            fork.end_fork_since(generation)
        if (seconds := perf_counter() - start) > SLOW_STEP:
            note_slow_step(name, seconds, start + seconds)


_NOTHING: Any = object()


class Steps(Generator[Any, Any, R]):
    """An awaitable that takes the steps of `coroutine` by `take_step`.

    If the first step was taken, it begins to wait for `found`. It is no generator, whose frame
    would be kept for as long as a call waits. (`benchmarks.memory`)
    """

    __slots__ = ("_found", "_name", "coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, R], name: str, found: Any = _NOTHING) -> None:
        self.coroutine, self._name, self._found = coroutine, name, found

    def __await__(self) -> Generator[Any, Any, R]:
        return self

    def __next__(self) -> Any:  # as `send(None)`, without another function for each step
        if (found := self._found) is not _NOTHING:
            self._found = _NOTHING
            return found
        has_ended, found = take_step(self.coroutine.send, None, self._name)
        if has_ended:
            raise StopIteration(found)
        return found

    def send(self, value: Any) -> Any:
        """Take the next step."""
        return next(self) if value is None else self._take(self.coroutine.send, value)

    def throw(self, exc: Any, value: Any = None, traceback: Any = None) -> Any:
        """Take the next step with an exception."""
        return self._take(self.coroutine.throw, exc if value is None else value)

    def close(self) -> None:
        """End the coroutine."""
        self.coroutine.close()

    def _take(self, step: Callable[[Any], Any], value: Any) -> Any:
        has_ended, found = take_step(step, value, self._name)
        if has_ended:
            raise StopIteration(found)
        return found


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
    if _IS_EAGER:
        return asyncio.Task(coroutine, loop=loop, name=name, context=context, eager_start=True)  # type: ignore[call-arg]
    # As `asyncio.current_task`, which is no C function here. No step can run inside another task's.
    if asyncio.tasks._current_tasks.get(loop) is not None:  # type: ignore[attr-defined]
        return asyncio.Task(coroutine, loop=loop, name=name, context=context)
    # Python 3.11 schedules the step, uvloop in a queue of C: it is taken here, instead. A loop may
    # have a `call_soon` of its own already, and one of another library may have slots.
    take = partial(_take_step, loop, context)
    try:  # noqa: SIM105 - each call comes here, and `suppress` takes half a microsecond
        loop.__dict__.setdefault("call_soon", take)
    except AttributeError:
        pass
    try:
        return asyncio.Task(coroutine, loop=loop, name=name, context=context)
    except BaseException:
        if getattr(loop, "call_soon", None) is take:
            del loop.call_soon
        raise


_IS_EAGER = sys.version_info >= (3, 12)


def _take_step(
    loop: Any, own: contextvars.Context, step: Any, *args: Any, context: Any = None
) -> Any:
    if context is not own:  # of a finalizer that runs meanwhile, perhaps of a task that it makes
        return type(loop).call_soon(loop, step, *args, context=context)
    del loop.call_soon
    return own.run(step)


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
