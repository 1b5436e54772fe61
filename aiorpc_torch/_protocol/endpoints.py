"""Entry points that peers call by torch RPC, on torch's threads, even if the event loop is blocked.

They delegate to the registered `Endpoint`. Without one they answer with `NotServing`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.rpc import functions
from torch.futures import Future

from .._torch.thread_state import pin_thread_state
from ..errors import NotServing
from .exceptions import RemoteFailure
from .handshake import VERSION, Party
from .plain import dump, reader


class Endpoint(Protocol):
    """A worker that answers peers. Its methods may be called in any thread."""

    @property
    def name(self) -> str:
        """The worker's name."""

    def introduce(self, data: bytes) -> "Future[Any]":
        """Return the credentials and addresses for a connection."""

    def payload(self, data: bytes, tensors: Sequence[Tensor]) -> "Future[Any]":
        """Take the payload of a call; return its result."""

    def collect(self, data: bytes) -> "Future[Any]":
        """Return a result that is kept for its caller."""

    def leave_message(self, data: bytes) -> "Future[Any]":
        """Note that a peer leaves, or has failed."""

    def departure(self, data: bytes) -> "Future[Any]":
        """Note what a peer does; answer when those that it waits for have left."""

    def rejoin(self, data: bytes) -> "Future[Any]":
        """Return "" to accept a replacement process, or the reason for the rejection."""

    def tally(self) -> tuple[int, int, int]:
        """Return the counts of received and of running calls, and the bytes of kept results."""

    def running_calls(self, but: object) -> list[tuple[str, str, float]]:
        """Return method, caller and start of each unanswered call, but those of a function."""

    def accept_torch(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> "Future[Any]":
        """Run a function on the event loop for a plain torch client."""

    def lend_thread(self, task: Callable[[], None]) -> None:
        """Run `task`, which must not raise, in a thread for plain `def` methods."""


NO_WORLD = "this process is in no world: enter worker(), local_world() or attach() first"
NOT_SERVING = "no worker serves in this process: enter worker(), local_world() or attach() first"

_endpoint: Endpoint | None = None


def register(endpoint: Endpoint | None) -> None:
    """Let `endpoint` answer for this process; None ends that."""
    global _endpoint
    _endpoint = endpoint


def serving() -> Endpoint | None:
    """Return the registered endpoint, None if there is none."""
    return _endpoint


def not_serving() -> "Future[Any]":
    """Return the answer of a process that does not serve."""
    return completed_future(RemoteFailure.of(NotServing(NOT_SERVING), "the callee"))


def completed_future(value: Any) -> "Future[Any]":
    """Return a torch future with that result."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@functions.async_execution  # type: ignore[untyped-decorator]
def ping(_: bytes) -> "Future[Any]":
    """Answer at once: this process is alive."""
    return completed_future(None)


@functions.async_execution  # type: ignore[untyped-decorator]
def introduce(data: bytes) -> "Future[Any]":
    """Introduce a caller that wants a connection."""
    pin_thread_state()
    return not_serving() if _endpoint is None else _endpoint.introduce(data)


@functions.async_execution  # type: ignore[untyped-decorator]
def payload(data: bytes, tensors: Sequence[Tensor] = ()) -> "Future[Any]":
    """Take the payload of a call; return its result."""
    pin_thread_state()
    return not_serving() if _endpoint is None else _endpoint.payload(data, tensors)


@functions.async_execution  # type: ignore[untyped-decorator]
def collect(data: bytes) -> "Future[Any]":
    """Return a result that is kept for its caller."""
    pin_thread_state()
    return not_serving() if _endpoint is None else _endpoint.collect(data)


@functions.async_execution  # type: ignore[untyped-decorator]
def leave_message(data: bytes) -> "Future[Any]":
    """Note that a peer leaves, or has failed."""
    return not_serving() if _endpoint is None else _endpoint.leave_message(data)


@functions.async_execution  # type: ignore[untyped-decorator]
def departure(data: bytes) -> "Future[Any]":
    """Note what a peer does; answer when those that it waits for have left."""
    return not_serving() if _endpoint is None else _endpoint.departure(data)


AttachHandler = Callable[[bytes], "Future[Any]"]
"""Takes the attach message of a peer, and returns a future of this process's own."""

_attach_handler: AttachHandler | None = None


def handle_attach_messages(handler: AttachHandler | None) -> None:
    """Let `handler` answer attach messages; None: this process was never attached."""
    global _attach_handler
    _attach_handler = handler


def attach_message_of(
    me: Party, epoch: int, is_attached: bool, device_map: Mapping[str, str] | None = None
) -> bytes:
    """Return the message that tells a peer whether this process is attached.

    The epoch, how many times the process has attached, orders its messages.
    """
    return dump((VERSION, me.name, epoch, is_attached, {**(device_map or {})}))


read_attach_message = reader(tuple[bytes, str, int, bool, dict[str, str]])
"""Return the parts of an attach message: version, worker, epoch, is_attached, device map."""


@functions.async_execution  # type: ignore[untyped-decorator]
def attach_message(data: bytes) -> "Future[Any]":
    """Note that a peer is attached or has left, and answer with this process's own message."""
    if _attach_handler is not None:
        return _attach_handler(data)
    return completed_future(attach_message_of(Party("", -1), 0, False))


@functions.async_execution  # type: ignore[untyped-decorator]
def rejoin(data: bytes) -> "Future[Any]":
    """Accept or reject a replacement process."""
    return not_serving() if _endpoint is None else _endpoint.rejoin(data)
