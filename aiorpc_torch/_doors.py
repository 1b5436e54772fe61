"""The process's `Server`, if it has one: for plain torch clients, and for `@batched` functions."""

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from torch.distributed.rpc import functions
from torch.futures import Future

from ._jobs import wants_loop
from ._protocol import endpoints
from ._recording import entered
from ._server.server import Server
from ._threads import daemon, run_blocking
from .errors import NotServing

__all__ = ("async_execution",)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_serving: Server | None = None


def serve(server: Server | None) -> None:
    """Let `server` answer for this process; None: nobody does."""
    global _serving
    _serving = server
    endpoints.serve(server)


def serving() -> Server | None:
    """Who answers for this process."""
    return _serving


def answer_torch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
    """Run a function that wants the loop for a plain torch client, who gets the future."""
    if _serving is None:
        raise NotServing(endpoints.NOT_SERVING)
    return _serving.accept_torch(function, *args, **kwargs)


async def in_thread(function: Callable[[], T]) -> T:
    """Run a plain function in one of the worker's threads; without a worker, in a new one."""
    start = daemon("aiorpc-def") if _serving is None else _serving.lend_thread
    if (recording := entered()) is not None:
        function = functools.partial(recording.run, function)
    return await run_blocking(start, functools.partial(contextvars.copy_context().run, function))


def start(coroutine: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
    """Start a coroutine on the running loop. It must not raise."""
    if _serving is not None:
        return _serving.start(coroutine, name)
    return asyncio.get_running_loop().create_task(coroutine, name=name)


def on_a_loop() -> bool:
    """Whether this thread is running an event loop."""
    return asyncio._get_running_loop() is not None


def async_execution(
    function: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Let plain torch clients call an `async def`, as with `torch`'s decorator of the same name.

    `rpc.rpc_sync("ps", f, args=...)` then runs the coroutine on the callee's serving loop and
    occupies none of its RPC threads while it waits. Awaited locally, or called through this
    library, it is the coroutine function that it was. As with torch's, `@staticmethod` and
    `@classmethod` go outside.

    Raises:
        TypeError: if `function` is not an `async def`.
    """
    if not inspect.iscoroutinefunction(function):
        raise TypeError(
            f"async_execution decorates an `async def`, and {function!r} is none; a function "
            "that returns a torch Future takes torch's own rpc.functions.async_execution"
        )

    @functools.wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> Any:
        if on_a_loop():
            return function(*args, **kwargs)
        return answer_torch(function, *args, **kwargs)

    wants_loop(door)
    return functions.async_execution(door)  # type: ignore[no-any-return, no-untyped-call]
