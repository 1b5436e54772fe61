"""The worker that serves in this process, as code that runs on its loop finds it.

`@batched` functions and coroutines for plain torch clients run on the serving worker if there is
one; without a worker they run on the event loop that awaits them.
"""

import asyncio
import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from torch.futures import Future

from .._aio.threads import daemon, run_blocking
from ..errors import NotServing
from . import endpoints
from .recording import entered

T = TypeVar("T")


def answer_torch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
    """Run a function that wants the loop for a plain torch client; return the client's future."""
    endpoint = endpoints.serving()
    if endpoint is None:
        raise NotServing(endpoints.NOT_SERVING)
    return endpoint.accept_torch(function, *args, **kwargs)


async def in_thread(function: Callable[[], T]) -> T:
    """Run a plain function in one of the worker's threads; without a worker, in a new one."""
    endpoint = endpoints.serving()
    start = daemon("aiorpc-def") if endpoint is None else endpoint.lend_thread
    if (recording := entered()) is not None:
        function = functools.partial(recording.run, function)
    return await run_blocking(start, functools.partial(contextvars.copy_context().run, function))


def start(coroutine: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
    """Start a coroutine on the running loop. It must not raise."""
    endpoint = endpoints.serving()
    if endpoint is not None:
        return endpoint.start(coroutine, name)
    return asyncio.get_running_loop().create_task(coroutine, name=name)


def on_a_loop() -> bool:
    """Return whether this thread runs an event loop."""
    return asyncio._get_running_loop() is not None


_WANTS_LOOP = "_aiorpc_wants_loop"


def wants_loop(function: Any) -> None:
    """Mark a callable that returns an awaitable when it is called on an event loop."""
    setattr(function, _WANTS_LOOP, True)


_ASYNC = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


def runs_on_loop(function: Callable[..., Any]) -> bool:
    """Return whether a call of `function` starts on the loop and not in a thread."""
    code = getattr(function, "__code__", None)  # a method has its function's
    if isinstance(code, types.CodeType) and code.co_flags & _ASYNC:
        return True
    if getattr(function, _WANTS_LOOP, False) is True:  # a proxy has any attribute
        return True
    # A partial, or what `inspect.markcoroutinefunction` has marked.
    return code is None and (
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    )
