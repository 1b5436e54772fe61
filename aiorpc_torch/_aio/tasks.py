"""The steps of a coroutine, timed: whoever holds the loop for long is named in a warning.

And who never takes the last of them is not waited for.
"""

import asyncio
import logging
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, TypeVar

R = TypeVar("R")

log = logging.getLogger("aiorpc_torch")

SLOW = 0.1  # seconds of one step, in which the loop serves nobody else


@types.coroutine
def timed(coroutine: Coroutine[Any, Any, R], name: str) -> Generator[Any, Any, R]:
    """Await `coroutine`, and warn of each step that holds the loop for longer than `SLOW`."""
    step, value = coroutine.send, None
    while True:
        start = perf_counter()
        try:
            waits_for = step(value)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            if perf_counter() - start > SLOW:
                warn(name, perf_counter() - start)
        try:
            step, value = coroutine.send, (yield waits_for)
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as exc:
            step, value = coroutine.throw, exc


class Within(Generator[Any, Any, R]):
    """Awaits `coroutine`, each step inside `around()`: what belongs to a thread, not a task."""

    def __init__(
        self, around: Callable[[], AbstractContextManager[None]], coroutine: Coroutine[Any, Any, R]
    ) -> None:
        self._around = around
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, R]:
        return self

    def send(self, value: Any) -> Any:
        """The next step."""
        with self._around():
            return self._coroutine.send(value)

    def throw(self, *exc: Any) -> Any:
        """The next step, with an exception."""
        with self._around():
            return self._coroutine.throw(*exc)


def disown(task: "asyncio.Task[Any]", name: str) -> None:
    """Let the loop end without this task, which was cancelled and goes on; it is named in the log.

    `asyncio.run` cancels every task that it knows of and waits until they end, for as long as that
    takes: one coroutine that swallows its cancellation would keep the process alive for ever.
    """
    log.warning("%s did not end when its worker stopped", name)
    asyncio.tasks._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it was said already


def warn(name: str, seconds: float) -> None:
    """Say who held the loop."""
    log.warning(
        "%s held the event loop for %.2f s: nothing else was served meanwhile. A plain `def` would "
        "run in a thread",
        name,
        seconds,
    )
