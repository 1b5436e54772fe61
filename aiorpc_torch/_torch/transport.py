"""A torch Future as an awaitable, and torch's transport errors by name.

With `_world` the only room that knows how torch completes. Facts, seen on torch 2.13 and 2.15 and
held by tests/test_bridge.py: a callback runs on one of torch's threads, or at once on the caller's
if the future is done; `wait()` on a done future does not block and orders CUDA streams, `value()`
does not; a future cannot be cancelled and keeps its callbacks until it completes.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.futures import Future

from .._aio.entry_queue import Inbox
from ..errors import RemoteError, RpcError, WorkerLost, said
from .compat import (
    PythonUDF,
    RawFuture,
    WorkerInfo,
    autograd_context,
    force_context,
    invoke_rpc,
    serialize,
)
from .thread_state import keep_state

__all__ = ("wrap_future",)

T = TypeVar("T")

_Completion = tuple["Callable[[Future[Any]], None]", "Future[Any]"]

_inboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Inbox[_Completion]] = WeakKeyDictionary()


def wrap_future(future: "Future[T]") -> "asyncio.Future[T]":
    """An asyncio future of the running loop for any `torch.futures.Future`.

    The result is taken with `wait()` on the loop's thread, so work queued on the current CUDA
    stream after the `await` is ordered after whatever produced the result. Cancelling the
    awaiting task drops the result; a torch future itself cannot be cancelled.

    Raises:
        TypeError: if `future` is not a `torch.futures.Future`.
        RuntimeError: if no event loop is running in this thread.
    """
    if not isinstance(future, RawFuture):
        raise TypeError(f"wrap_future takes a torch.futures.Future, not {future!r}")
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    if future.done():
        _deliver(result, future)
    else:
        when_done(future, lambda done: _deliver(result, done))
    return result


def when_done(
    future: "Future[Any]",
    take: "Callable[[Future[Any]], None]",
    first: "Callable[[Future[Any]], None] | None" = None,
) -> None:
    """Call `take(future)` on the running loop's thread when the future is done; never at once.

    Before that `first(future)`, which must not raise, on whatever thread it is done: should the
    loop be closed by then, nothing else is called.
    """
    inbox = _inbox_of(asyncio.get_running_loop())

    def on_done(done: "Future[Any]") -> None:
        keep_state()
        if first is not None:
            first(done)
        inbox.push((take, done))

    future.add_done_callback(on_done)


def _inbox_of(loop: asyncio.AbstractEventLoop) -> Inbox[_Completion]:
    inbox = _inboxes.get(loop)
    if inbox is None:
        inbox = _inboxes[loop] = Inbox(loop, _take)
    return inbox


def _take(completion: _Completion) -> None:
    take, future = completion
    take(future)


def _deliver(result: "asyncio.Future[T]", future: "Future[T]") -> None:
    if result.done():  # the awaiting task was cancelled
        return
    try:
        value = future.wait()
    except StopIteration as exc:  # asyncio refuses it in a future, a coroutine cannot raise it
        result.set_exception(RuntimeError(f"the future raised {exc!r}"))
    except Exception as exc:
        result.set_exception(exc)
    else:
        result.set_result(value)


def send(
    peer: WorkerInfo, function: Callable[..., Any], data: bytes, tensors: Sequence[Tensor] = ()
) -> "Future[Any]":
    """Call `function(data)`, or `function(data, tensors)`, on another worker by torch RPC.

    `function` is an `async_execution` function. It is `rpc_async` without the look-up among torch's
    operators and without the profiler's record.
    """
    args = (data, [*tensors]) if tensors else (data,)
    payload, table = serialize(PythonUDF(function, args, {}))  # type: ignore[no-untyped-call]
    return invoke_rpc(peer, payload, table, 0.0, True)  # type: ignore[no-any-return]


@contextlib.contextmanager
def in_autograd_context(number: int) -> Iterator[None]:
    """Have that context open in this thread, -1: none; afterwards, what was."""
    if force_context is None:
        raise RuntimeError(f"this torch, {torch.__version__}, does not let its contexts be set")
    before = autograd_context()
    force_context(number)
    try:
        yield
    finally:
        force_context(before)


def transport_error(exc: BaseException, worker: str) -> RpcError:
    """What torch's RuntimeError about a message to `worker` means.

    Our own functions answer with envelopes and never raise, so an error here is the transport's:
    every text of a broken pipe names the TensorPipe source file it comes from.
    """
    text = said(exc).strip()
    first = text.partition("\n")[0]  # a C++ traceback may follow, which names the agent's file
    if "tensorpipe/" in first or "RPC has not been initialized" in text:
        return WorkerLost(worker, first)
    return RemoteError(f"the message to worker {worker!r} failed: {text}")
