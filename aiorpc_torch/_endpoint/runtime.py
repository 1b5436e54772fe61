"""Access to the serving worker's threads and event loop, for code that may run without a worker.

`@batched` functions and coroutines for plain torch clients run on the serving worker. Without a
worker they run on the event loop that awaits them.
"""

import asyncio
import contextvars
import functools
import inspect
import queue
import threading
import types
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from torch.futures import Future

from .._aio.threads import run_in_thread
from .._context.recording import current_record
from .._torch.switches import has_switch
from .._torch.thread_state import thread_settings
from . import entry_points

T = TypeVar("T")
F = TypeVar("F")


def run_for_torch_client(function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
    """Run a function on the worker's event loop; return the plain torch client's future."""
    endpoint = entry_points.serving()
    if endpoint is None:
        text = f"this worker is not in attach() yet, or has left it ({entry_points.NOT_SERVING})"
        raise entry_points.not_in_world(text)
    return endpoint.accept_torch(function, *args, **kwargs)


def in_thread(function: Callable[[], T]) -> Coroutine[Any, Any, T]:
    """Run a plain function in a thread of the worker; without a worker, in a new thread."""
    node = entry_points.here
    if (recording := current_record()) is not None:
        function = functools.partial(recording.run, function)
    run = functools.partial(contextvars.copy_context().run, function)
    start = None if node is None else node.server.executor.submit_to_threads
    return run_in_thread(run, "aiorpc-def", start)


class OwnThread:
    """A daemon thread with one context for the steps of a generator.

    The modes of torch, such as `no_grad`, are those of a thread, and a generator keeps them between
    its steps: no other code must run there meanwhile, and no step in another thread.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._settings = thread_settings()
        self._steps: _Steps = queue.SimpleQueue()
        self._is_started = False

    def run(self, function: Callable[[], T]) -> Coroutine[Any, Any, T]:
        """Run a function in the thread, after those before."""
        if (recording := current_record()) is not None:
            function = functools.partial(recording.run, function)
        step = functools.partial(self._context.run, function)
        return run_in_thread(step, "aiorpc-def", self._start)

    def _start(self, step: Callable[[], None]) -> None:
        if not self._is_started:
            args = self._steps, self._settings  # not this: its end ends the thread
            threading.Thread(target=_run_steps, args=args, name="aiorpc-def", daemon=True).start()
            self._is_started = True
        self._steps.put(step)

    def close(self) -> None:
        """End the thread after the steps that it has got."""
        self._steps.put(None)

    __del__ = close


_Steps = queue.SimpleQueue[Callable[[], None] | None]


def _run_steps(steps: _Steps, settings: Callable[[], None]) -> None:
    settings()
    while (step := steps.get()) is not None:
        step()
        del step  # it must not live until the next


def in_event_loop() -> bool:
    """Return whether this thread runs an event loop."""
    return asyncio._get_running_loop() is not None


_ON_LOOP = "_aiorpc_runs_on_loop"


def mark_runs_on_loop(function: F) -> F:
    """Let remote calls of `function` start on the event loop, though it is no coroutine function.

    It must not block: it returns an awaitable, or at once. Return `function`.
    """
    setattr(function, _ON_LOOP, True)
    return function


_ASYNC = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


def runs_on_loop(function: Callable[..., Any]) -> bool:
    """Return whether calls of `function` start on the event loop, not in a thread."""
    code = getattr(function, "__code__", None)  # a method has its function's
    if isinstance(code, types.CodeType) and code.co_flags & _ASYNC:
        return True
    if getattr(function, _ON_LOOP, False) is True:  # not only true: a proxy has any attribute
        return True
    # A partial, or marked by `inspect.markcoroutinefunction`.
    return code is None and (
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    )


def warn_if_switch_is_void(function: Any) -> None:
    """Warn if a decorator of torch surrounds only the making of a coroutine, not its steps."""
    is_switched = False
    seen: set[int] = set()  # a function may be its own `__wrapped__`
    while isinstance(function, types.FunctionType | types.MethodType) and id(function) not in seen:
        seen.add(id(function))
        is_switched = is_switched or has_switch(function)
        function = getattr(function, "__wrapped__", None)
        if is_switched and runs_on_loop(function):
            name = getattr(function, "__qualname__", "a partial")
            warnings.warn(
                f"{name} is an `async def` or `@batched`, on which torch's "
                "decorators no_grad, inference_mode and autocast have no effect: write "
                "`with torch.no_grad():` around the lines that compute, without an `await` among "
                "them",
                stacklevel=2,
            )
            return
