"""Calls by plain torch clients."""

import functools
import inspect
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from torch.futures import Future

from .._endpoint.runtime import in_event_loop, mark_runs_on_loop, run_for_torch_client
from .._torch.compat import RemoteException, functions, refuse_coroutines
from .._torch.sendable import check_tensors
from .._torch.tree import tensors_in
from .._wire.messages import Arguments
from .calls import ServerCall

COROUTINE = "__aiorpc_coroutine__"
"""Attribute of a function of `async_execution`: the `async def` behind it."""

# What a client of torch gets else is "cannot pickle 'coroutine' object", behind it C++ frames.
refuse_coroutines(
    "is an `async def`: decorate it with @aiorpc_torch.async_execution for clients of torch RPC, "
    "or call it by `await aiorpc_torch.call(...)` or `await aiorpc_torch.remote(rref)...`"
)

P = ParamSpec("P")
R = TypeVar("R")


def async_execution(
    function: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Let plain torch clients call an `async def`, like torch's decorator of the same name.

    `rpc.rpc_sync("ps", f, args=...)` then runs the coroutine on the callee's serving loop. It
    occupies no RPC thread while it waits. Awaited locally or called through this library, the
    function works as before. Put `@staticmethod` and `@classmethod` above this decorator.

    Raises:
        TypeError: if `function` is not an `async def`.
    """
    if not inspect.iscoroutinefunction(function):
        raise TypeError(
            f"async_execution requires an `async def`, got {function!r}; for a function that "
            "returns a torch Future use torch's own rpc.functions.async_execution"
        )

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
        if in_event_loop():
            return function(*args, **kwargs)
        return run_for_torch_client(function, *args, **kwargs)

    mark_runs_on_loop(wrapper)
    setattr(wrapper, COROUTINE, function)
    return functions.async_execution(wrapper)  # type: ignore[no-any-return, no-untyped-call]


class TorchCall(ServerCall):
    """A call by plain torch RPC, which is answered by a torch future."""

    # Not `set_exception`: torch 2.13 and 2.15 then return the exception to the caller as a *value*.
    # (tests/loopback/test_torch_clients.py)
    on_loop = True
    caller = "a torch client"

    def __init__(
        self,
        open_calls: "set[TorchCall]",
        reply: "Future[Any]",
        function: Callable[..., Any],
        arguments: Arguments,
        worker: str,
    ) -> None:
        super().__init__(function, arguments)
        self.reply = reply
        self.worker = worker
        self.started = time.monotonic()
        self._open_calls = open_calls
        open_calls.add(self)

    def succeed(self, value: Any) -> None:
        try:
            check_tensors(tensors_in(value))
        except ValueError as exc:
            self.fail(exc)
        else:
            self._finish(value)

    def fail(self, exc: BaseException) -> None:
        text = "".join(traceback.format_exception(exc))
        message = f"On worker {self.worker}:\n{exc!r}\n{text}"
        # torch 2.11 to 2.15 decodes the message with unicode_escape (internal.py). Unencoded, text
        # beyond ASCII would be garbled and a backslash would raise.
        message = message.encode("unicode_escape").decode("ascii")
        self._finish(RemoteException(message, type(exc)), exc)

    def _finish(self, answer: Any, failure: BaseException | None = None) -> None:
        try:
            self._open_calls.remove(self)
        except KeyError:  # ended before
            return
        if self.on_end is not None:
            self.on_end(failure)
        self.reply.set_result(answer)
