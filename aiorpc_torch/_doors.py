"""How calls come into this process: our own messages, and plain torch clients.

What the doors open on is the process's `Server`, if it has one; they run on threads of torch's.
"""

import asyncio
import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.distributed.rpc import functions
from torch.futures import Future

from ._exceptions import Failure
from ._jobs import wants_loop
from ._recording import entered
from ._server import Server
from ._states import keep_state
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


@functions.async_execution  # type: ignore[untyped-decorator]
def answer(data: bytes, tensors: Sequence[Tensor] = ()) -> "Future[Any]":
    """What every message between workers calls. On a thread of torch's."""
    keep_state()
    if _serving is None:
        return nobody()
    return _serving.accept(data, tensors)


@functions.async_execution  # type: ignore[untyped-decorator]
def ping(_: bytes) -> "Future[Any]":
    """Answered at once, by whichever thread of torch's is free: this process lives."""
    return _completed(None)


@functions.async_execution  # type: ignore[untyped-decorator]
def watch(name: bytes) -> "Future[Any]":
    """Not answered until worker `name` or this one leaves: what breaks it is this one's death."""
    return nobody() if _serving is None else _serving.peers.watched(name)


@functions.async_execution  # type: ignore[untyped-decorator]
def meet(member: bytes) -> "Future[Any]":
    """A worker has come back: answered with "", or why it is not believed."""
    return nobody() if _serving is None else _serving.meet(member)


def serving() -> Server | None:
    """Who answers for this process."""
    return _serving


def nobody() -> "Future[Any]":
    """The answer of a process that serves no more, or not yet."""
    return _completed(Failure.of(NotServing(_NOBODY), "the callee"))


def _completed(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def answer_torch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
    """Run a function that wants the loop for a plain torch client, who gets the future."""
    if _serving is None:
        raise NotServing(_NOBODY)
    return _serving.accept_torch(function, *args, **kwargs)


async def in_thread(function: Callable[[], T]) -> T:
    """Run a plain function in one of the worker's threads; without a worker, in a new one."""
    start = daemon("aiorpc-def") if _serving is None else _serving.lend_thread
    if (recording := entered()) is not None:
        function = functools.partial(recording.run, function)
    return await run_blocking(start, functools.partial(contextvars.copy_context().run, function))


def start(
    code: types.CodeType | None, coroutine: Coroutine[Any, Any, None], name: str
) -> "asyncio.Task[None] | None":
    """Start a coroutine on the running loop; its task, or None if it is done already.

    `code` is the function's in it that may wait, None if it will. It must not raise.
    """
    if _serving is not None:
        return _serving.start(code, coroutine, name)
    return asyncio.get_running_loop().create_task(coroutine, name=name)


_NOBODY = "no worker is serving in this process: enter worker() or local_world() first"


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
