"""Entry points that peers call by torch RPC, on torch's threads, even if the event loop is blocked.

They delegate to the current node. Without one they answer with `WorkerLeft`.

What must go on while an event loop is blocked is here: pings, collecting results, plain torch
clients. Calls need the event loop, also those of a plain `def`. If a thread read the socket, a lone
call would need two more changes of threads.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from torch.futures import Future

from .._aio.fork import begin_worker, end_worker, fork_text
from .._aio.signals import force_exit
from .._torch.agent import agent_name
from .._torch.compat import WorkerInfo, functions, on_group_change
from .._torch.thread_state import pin_thread_state
from .._wire.exceptions import RemoteFailure
from .._wire.handshake import VERSION, Party
from .._wire.plain import dump, reader
from ..errors import NotInWorld, WorkerLeft

if TYPE_CHECKING:  # packages above
    from .._node.node import Node
    from .._server.server import Server

log = logging.getLogger("aiorpc_torch")


NO_WORLD = "this process is in no world: enter worker(), local_world() or attach() first"
IN_A_WORLD = "this process is attached or in a world already"
NOT_SERVING = "no worker serves in this process: enter worker(), local_world() or attach() first"


here: "Node | None" = None
"""The node of this process, None if it is in no world. Only `enter` and `leave` set it."""

_lock = threading.Lock()


def enter(node: "Node") -> None:
    """Make this the current node. Raises RuntimeError if there is one."""
    global here
    with _lock:
        if here is not None:
            raise RuntimeError(f"{IN_A_WORLD}: {how_to_leave()}")
        here = node
    begin_worker(node.server.name)


def leave(node: "Node") -> None:
    """Let this process be in no world, if this is its node."""
    global here
    if here is node:
        here = None
        end_worker()


def _leave_to_parent() -> None:
    """Let a fork of this process be in no world: it has none of the node's threads."""
    global here
    here = None


os.register_at_fork(after_in_child=_leave_to_parent)


def not_in_world(text: str = NO_WORLD) -> NotInWorld:
    """Return the error of a process that is in no world; a fork of a worker's says what it is."""
    return NotInWorld(fork_text() or text)


def keep(manager: object) -> None:
    """Let the node refer to the context manager of its world."""
    if here is not None:
        here.manager = manager


def how_to_leave() -> str:
    """Return what a process must do to leave its world, for an error."""
    if here is None:
        return "call rpc.shutdown() first"
    if here.manager is None:  # in `run_local`
        return "leave it first"
    way = here.manager.leave_text
    return f"leave it first (in a notebook: `{way}`, where `me` is what its entry returned)"


def serving() -> "Server | None":
    """Return the server of this process, None if it is in no world."""
    return None if (node := here) is None else node.server


def not_serving() -> "Future[Any]":
    """Return the answer of a process that does not serve."""
    try:
        name = agent_name()
    except RuntimeError:  # torch stops
        name = "the callee"
    error = WorkerLeft(name, "its process serves in no world", may_have_run=False)
    return completed_future(RemoteFailure.refusal(error, name))


def completed_future(value: Any) -> "Future[Any]":
    """Return a torch future with that result."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@functions.async_execution  # type: ignore[untyped-decorator]
def introduce(data: bytes) -> "Future[Any]":
    """Introduce a caller that wants a connection."""
    pin_thread_state()
    return not_serving() if (node := here) is None else node.introduce(data)


@functions.async_execution  # type: ignore[untyped-decorator]
def loop_lines(_: bytes) -> "Future[Any]":
    """Return the lines at which the event loop stands, which a caller takes for blocked."""
    return not_serving() if (node := here) is None else completed_future(node.loop_lines())


@functions.async_execution  # type: ignore[untyped-decorator]
def payload(data: bytes, tensors: Sequence[Tensor] = ()) -> "Future[Any]":
    """Take the payload of a call; return its result."""
    pin_thread_state()
    return not_serving() if (node := here) is None else node.server.payload(data, tensors)


@functions.async_execution  # type: ignore[untyped-decorator]
def collect(data: bytes) -> "Future[Any]":
    """Return a result that is kept for its caller."""
    pin_thread_state()
    return not_serving() if (node := here) is None else node.server.collect(data)


@functions.async_execution  # type: ignore[untyped-decorator]
def leave_message(data: bytes) -> "Future[Any]":
    """Note that a peer leaves, or has failed."""
    return not_serving() if (node := here) is None else node.leave_message(data)


@functions.async_execution  # type: ignore[untyped-decorator]
def departure(data: bytes) -> "Future[Any]":
    """Note what a peer does; answer when those that it waits for have left."""
    return not_serving() if (node := here) is None else node.departure(data)


@functions.async_execution  # type: ignore[untyped-decorator]
def exit_process(_: bytes) -> NoReturn:
    """End this process, for what supervises it to start another one."""
    log.warning("a peer has restarted this worker: its process ends")
    force_exit(1)


_epoch = 0  # how many times this process has attached


def next_epoch() -> int:
    """Count that this process attaches; return the number."""
    global _epoch
    _epoch += 1
    return _epoch


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
    answer = None if (node := here) is None else node.attach_message(data)
    return answer or completed_future(attach_message_of(Party("", -1), _epoch, False))


def _note_group_change(worker: WorkerInfo, is_join: bool) -> None:
    if (node := here) is not None:
        node.group_change(worker, is_join)


on_group_change(_note_group_change)
