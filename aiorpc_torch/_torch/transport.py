"""torch's futures as awaitables, and its messages and their errors.

Facts of torch 2.13 and 2.15: a callback runs on one of torch's threads, or at once in the caller's
if the future is done. On a done future `wait()` does not block and orders CUDA streams; `value()`
does not order them. A future cannot be cancelled, and keeps its callbacks until it is done.
(tests/unit/torch/test_wrap_future.py)
"""

import asyncio
import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.futures import Future

from .._aio.entry_queue import EntryQueue
from ..errors import NotInWorld, RemoteError, RpcError, WorkerLost, safe_str
from . import rrefs
from .compat import (
    PythonUDF,
    RawFuture,
    WorkerInfo,
    current_context_id,
    force_context,
    invoke_builtin,
    invoke_rpc,
    serialize,
)
from .cuda import note_delivered
from .thread_state import pin_thread_state

# Texts of the errors with which `rpc.shutdown` ends messages of its own process: torch sets the
# agent of the process to none only afterwards. (2.13, 2.15; tests/integration/test_attach.py)
_OWN_END = (
    "pipe closed (",
    "RPC is no longer running on this node",
    "RPC has not been initialized",
    "Current RPC agent is not set",
)

# libuv's texts for an attempt to connect that fails.
_NO_CONNECTION = ("connection refused", "host is unreachable", "connection timed out")

REACH_REMEDY = (
    "If it runs, give it the interface= (or AIORPC_INTERFACE) at which the others reach it, and "
    "open its ports"
)

T = TypeVar("T")

_Callback = Callable[["Future[Any]"], None]
_Queue = EntryQueue[Callable[[], None]]

_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()


def wrap_future(future: "Future[T]") -> "asyncio.Future[T]":
    """Return an asyncio future of the running loop for a `torch.futures.Future`.

    The result is taken with `wait()` on the loop's thread. So work queued on the current CUDA
    stream after the `await` runs after the work that produced the result. Cancelling the awaiting
    task drops the result; a torch future itself cannot be cancelled.

    Args:
        future: any torch future, as of `rpc_async`.

    Raises:
        TypeError: if `future` is not a `torch.futures.Future`.
        RuntimeError: if no event loop is running in this thread.
    """
    if not isinstance(future, RawFuture):
        raise TypeError(f"future must be a torch.futures.Future, got {future!r}")
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    if future.done():
        _deliver(result, future)
    else:
        when_done(future, lambda done: _deliver(result, done))
    return result


def when_done(future: "Future[Any]", callback: _Callback, first: _Callback | None = None) -> None:
    """Call `callback(future)` on the thread of the running loop when the future is done.

    It is never called before this returns, nor on a loop that is closed. `first`, which must not
    raise, is called before, on the thread that completes the future.
    """
    queue = _queue_of(asyncio.get_running_loop())

    def on_done(done: "Future[Any]") -> None:
        pin_thread_state()
        if first is not None:
            first(done)
        queue.put(functools.partial(callback, done))

    future.add_done_callback(on_done)


def _queue_of(loop: asyncio.AbstractEventLoop) -> _Queue:
    queue = _queues.get(loop)
    if queue is None:
        queue = _queues[loop] = EntryQueue(loop, operator.call)
    return queue


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
        note_delivered(value)
        result.set_result(value)


def send(
    peer: WorkerInfo, function: Callable[..., Any], data: bytes, tensors: Sequence[Tensor] = ()
) -> "Future[Any]":
    """Call `function(data)`, or `function(data, tensors)`, on another worker by torch RPC.

    `function` must be an `async_execution` function. This is `rpc_async` without its look-up among
    torch's operators and without the profiler's record.
    """
    args = (data, [*tensors]) if tensors else (data,)
    payload, table = serialize(PythonUDF(function, args, {}))  # type: ignore[no-untyped-call]
    return invoke_rpc(peer, payload, table, 0.0, True)  # type: ignore[no-any-return]


def ping(peer: WorkerInfo) -> "Future[Any]":
    """Let a worker show that its process runs, whatever its Python code does.

    torch answers an operator in C++, without the GIL. (2.15; `check_that_keeps_the_gil` in
    tests/integration/test_failure_detection.py)
    """
    # Of numbers: a profiler of the worker would show an operator of tensors.
    return invoke_builtin(peer, "aten::add", 0.0, 0, 0)  # type: ignore[no-any-return]


@contextlib.contextmanager
def enter_context_id(context_id: int) -> Iterator[None]:
    """Make `context_id` the autograd context of this thread inside the block, -1 for none.

    Raises:
        RuntimeError: if this torch does not export the function for it.
    """
    if force_context is None:
        raise RuntimeError(
            f"torch {torch.__version__} cannot set the autograd context of a thread: calls in a "
            "context are not supported"
        )
    before = current_context_id()
    force_context(context_id)
    try:
        yield
    finally:
        force_context(before)


def is_own_end(text: str) -> bool:
    """Return whether an error of torch's says that RPC has ended in this process."""
    return any(each in text for each in _OWN_END)


def classify_error(exc: BaseException, worker: str, address: str = "") -> RpcError:
    """Return the error for torch's RuntimeError about a message to `worker`.

    Our own functions reply with envelopes and never raise, so this is an error of the transport.
    The text of each broken pipe names the TensorPipe source file that found it, which is left out.
    With an address it names that if no connection was made, and the remedy.
    """
    text = safe_str(exc).strip()
    first = text.partition("\n")[0]  # a C++ traceback may follow, which names the agent's file
    if rrefs.is_adopted() and is_own_end(text):
        return NotInWorld("torch's RPC of this process has ended")
    if "tensorpipe/" in first:
        cause = first.partition(" (")[0].rpartition(": ")[2]
        if address and cause in _NO_CONNECTION:
            return WorkerLost(worker, f"no connection to {address}: {cause}. {REACH_REMEDY}")
        return WorkerLost(worker, f"its connection has ended: {cause}")
    if "RPC has not been initialized" in text:
        return WorkerLost(worker, "torch's RPC has ended in its process")
    return RemoteError(f"the message to worker {worker!r} failed: {text}")
