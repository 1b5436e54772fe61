"""What torch RPC calls in this process on behalf of peers. On threads of torch's.

They answer while the event loop is blocked. The process's `Endpoint`, if there is one, does the
work; without one a peer is told that nobody serves.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.rpc import functions
from torch.futures import Future

from .._torch.thread_state import keep_state
from ..errors import NotServing
from .exceptions import Failure


class Endpoint(Protocol):
    """A worker that answers peers. Its methods may be called in any thread but `start`."""

    @property
    def name(self) -> str:
        """The worker's name."""
        ...

    def introduce(self, data: bytes) -> "Future[Any]":
        """Answer with the credentials and addresses for a connection."""
        ...

    def payload(self, data: bytes, tensors: Sequence[Tensor]) -> "Future[Any]":
        """Take the payload of a call; the answer is its result."""
        ...

    def collect(self, data: bytes) -> "Future[Any]":
        """Answer with a result that is held for its caller."""
        ...

    def farewell(self, data: bytes) -> "Future[Any]":
        """Learn that a peer has failed and leaves."""
        ...

    def rejoin(self, data: bytes) -> "Future[Any]":
        """Answer a worker that has come back with "", or why it is not believed."""
        ...

    def tally(self) -> tuple[int, int, int]:
        """Return how many calls came in, how many of them run, and the bytes of held results."""
        ...

    def accept_torch(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> "Future[Any]":
        """Run a function that wants the loop for a plain torch client."""
        ...

    def lend_thread(self, task: Callable[[], None]) -> None:
        """Run `task`, which must not raise, in one of the threads for plain `def`s."""
        ...

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Start a coroutine that is no call, on the running loop."""
        ...


_endpoint: Endpoint | None = None


def serve(endpoint: Endpoint | None) -> None:
    """Let `endpoint` answer for this process; None: nobody does."""
    global _endpoint
    _endpoint = endpoint


def serving() -> Endpoint | None:
    """Return what answers for this process, None if nothing does."""
    return _endpoint


def not_serving() -> "Future[Any]":
    """Return the answer of a process that does not serve."""
    return completed(Failure.of(NotServing(NOT_SERVING), "the callee"))


def completed(value: Any) -> "Future[Any]":
    """Return a torch future that has its result."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


NOT_SERVING = "no worker is serving in this process: enter worker() or local_world() first"


@functions.async_execution  # type: ignore[untyped-decorator]
def ping(_: bytes) -> "Future[Any]":
    """Answer at once: this process lives."""
    return completed(None)


@functions.async_execution  # type: ignore[untyped-decorator]
def introduce(data: bytes) -> "Future[Any]":
    """Answer a caller that wants a connection."""
    keep_state()
    return not_serving() if _endpoint is None else _endpoint.introduce(data)


@functions.async_execution  # type: ignore[untyped-decorator]
def payload(data: bytes, tensors: Sequence[Tensor] = ()) -> "Future[Any]":
    """Take the payload of a call."""
    keep_state()
    return not_serving() if _endpoint is None else _endpoint.payload(data, tensors)


@functions.async_execution  # type: ignore[untyped-decorator]
def collect(data: bytes) -> "Future[Any]":
    """Answer with a result that is held."""
    keep_state()
    return not_serving() if _endpoint is None else _endpoint.collect(data)


@functions.async_execution  # type: ignore[untyped-decorator]
def farewell(data: bytes) -> "Future[Any]":
    """Learn that a peer has failed."""
    return not_serving() if _endpoint is None else _endpoint.farewell(data)


@functions.async_execution  # type: ignore[untyped-decorator]
def rejoin(data: bytes) -> "Future[Any]":
    """Answer a worker that has come back."""
    return not_serving() if _endpoint is None else _endpoint.rejoin(data)
