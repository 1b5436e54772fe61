"""A torch Future as an awaitable, and torch's transport errors by name.

With `_world` the only room that knows how torch completes. Facts, seen on torch 2.13 and 2.15 and
held by tests/test_bridge.py: a callback runs on one of torch's threads, or at once on the caller's
if the future is done; `wait()` on a done future does not block and orders CUDA streams, `value()`
does not; a future cannot be cancelled and keeps its callbacks until it completes.
"""

import asyncio
import contextlib
import ctypes
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C import Future as _AnyFuture  # what rpc_async returns; torch.futures.Future's base
from torch._C._distributed_rpc import WorkerInfo, _invoke_rpc_python_udf
from torch.distributed.rpc.internal import PythonUDF, serialize
from torch.futures import Future

from ._inbox import Inbox
from ._states import keep_state
from .errors import RemoteError, RpcError, WorkerLost, said

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
    if not isinstance(future, _AnyFuture):
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
    peer: WorkerInfo, door: Callable[..., Any], data: bytes, tensors: Sequence[Tensor] = ()
) -> "Future[Any]":
    """Call `door(data, tensors)`, which is an `async_execution` function, on another worker.

    `rpc_async` without what plain calls do not need: a search among torch's operators, a profiler's
    record, a pickler that looks for tensors (it is 30 µs of a call, torch 2.13 and 2.15).
    """
    if tensors:
        udf = PythonUDF(door, (data, [*tensors]), {})
        payload, table = serialize(udf)  # type: ignore[no-untyped-call]
    else:
        payload, table = _envelope(door, data), []
    return _invoke_rpc_python_udf(peer, payload, table, 0.0, True)  # type: ignore[no-any-return]


_HEADS: dict[Any, bytes] = {}


def _envelope(door: Callable[..., Any], data: bytes) -> bytes:
    """The pickle of `PythonUDF(door, (data,), {})`, of which only `data` is ever new."""
    head = _HEADS.get(door)
    if head is None:
        names = "".join(f"c{each.__module__}\n{each.__name__}\n" for each in (PythonUDF, door))
        head = _HEADS[door] = pickle.PROTO + b"\x05" + names.encode()
    size = len(data).to_bytes(8, "little")
    return b"".join((head, pickle.BINBYTES8, size, data, _TAIL))


_TAIL = (
    pickle.TUPLE1 + pickle.EMPTY_DICT + pickle.TUPLE3 + pickle.NEWOBJ + pickle.STOP
)  # (data,), {} : the arguments; then the object


def _find_container() -> tuple[Callable[[], int], Callable[[int], None] | None]:
    # torch asks in Python by raising where there is none, which costs 20 µs, and does not set at
    # all. The symbols are exported by 2.11 to 2.15; without them, no call is seen to be in a
    # context, and none can be.
    name = "_ZN5torch11distributed8autograd21DistAutogradContainer"
    try:
        library = ctypes.PyDLL(
            os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
        )
        get = library[f"{name}16currentContextIdEv"]
        put = library[f"{name}21forceCurrentContextIdEl"]
    except (OSError, AttributeError):
        return lambda: -1, None
    get.restype, get.argtypes = ctypes.c_int64, []
    put.restype, put.argtypes = None, [ctypes.c_int64]
    return get, put


autograd_context, _force_context = _find_container()
"""The id of the distributed autograd context that is open in this thread, -1 if none is."""


@contextlib.contextmanager
def in_autograd_context(number: int) -> Iterator[None]:
    """Have that context open in this thread, -1: none; afterwards, what was."""
    if _force_context is None:
        raise RuntimeError(f"this torch, {torch.__version__}, does not let its contexts be set")
    before = autograd_context()
    _force_context(number)
    try:
        yield
    finally:
        _force_context(before)


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
