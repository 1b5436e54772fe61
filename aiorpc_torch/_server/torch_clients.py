"""`async def`s that plain torch clients may call."""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from torch.distributed.rpc import functions

from .._protocol.runtime import answer_torch, on_a_loop, wants_loop

__all__ = ("async_execution",)

P = ParamSpec("P")
R = TypeVar("R")


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
