"""Hooks for tests of connections: look at them, drop them, hold calls back, wait until idle.

They act on the connections of the running event loop. A redesign of the connections changes this
module; tests that use it stay as they are.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .._client import pool
from .._endpoint import entry_points
from .._wire.connection_state import Phase
from ..errors import RpcError

Carrier = Literal["shared memory", "sockets", "torch"]
"""A way of large CPU tensors."""

CHECK_INTERVAL = 0.001  # seconds between two looks at what is in flight


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """A connection of this process to a worker, as it was when `connection` was called.

    Attributes:
        worker: name of the worker.
        number: number of the connection; a later connection of this process has a higher number.
        pending: calls and streams that wait for a reply.
        carrier: how the next large CPU tensor of an argument travels. A connection starts with
            "torch" and changes once both ends have agreed.
        result_carrier: the same for results; None if the worker is another process.
        holds_memory: True while large tensors are under way, or an end has received some in shared
            memory and keeps them. Seen at this end, and at the other one if it is in this process.
    """

    worker: str
    number: int
    pending: int
    carrier: Carrier
    result_carrier: Carrier | None
    holds_memory: bool


def connection(worker: str) -> ConnectionInfo:
    """Return the connection of the running event loop to a worker. Open one if there is none.

    Args:
        worker: name of a worker of this world; this worker's own name, too.

    Raises:
        NotInWorld: if this process is in no world.
        UnknownWorker: if there is no such worker.
        WorkerGone: if the worker is known to be gone.
    """
    return _info(pool.connection_to(worker))


def connections() -> list[ConnectionInfo]:
    """Return the connections of all event loops of this process, in the order of their numbers.

    A connection that takes no further calls is among them as long as it has pending ones.

    Raises:
        NotInWorld: if this process is in no world.
    """
    found = [each for _, each in pool.current().connections()]
    alive = [_info(each) for each in found if each.waiting or each.phase < Phase.RETIRING]
    return sorted(alive, key=lambda each: each.number)


def drop_connection(worker: str, error: RpcError | None = None) -> None:
    """Abort the running event loop's connection to a worker, as a reset by the network does.

    Pending calls raise `WorkerLost`, and the worker cancels them. The next call connects again.

    Args:
        worker: name of a worker of this world.
        error: raise this from the pending calls, and close the connection in order instead.

    Raises:
        NotInWorld, UnknownWorker, WorkerGone: as `connection`.
    """
    found = pool.connection_to(worker)
    if error is None:
        found.abort()
    else:
        found.leave("ended", "", error)


@contextlib.contextmanager
def stalled(worker: str) -> Iterator[None]:
    """Hold back calls to a worker until the end of the block, as a full socket does.

    Calls of the running event loop are made and wait unsent. The connection must be open.

    Args:
        worker: name of a worker of this world.

    Raises:
        NotInWorld, UnknownWorker, WorkerGone: as `connection`.
    """
    found = pool.connection_to(worker)
    found.pause_writing()
    try:
        yield
    finally:
        found.resume_writing()


def set_flow_limits(
    worker: str,
    *,
    calls: int | None = None,
    size: int | None = None,
    interval: float | None = None,
) -> None:
    """Set the limits of the running event loop's connection to a worker.

    Args:
        worker: name of a worker of this world.
        calls: most calls that are sent and not answered.
        size: most bytes of these calls; a single larger call is sent nevertheless.
        interval: seconds without an answer after which one call more is sent.

    Raises:
        NotInWorld, UnknownWorker, WorkerGone: as `connection`.
        ValueError: if a limit is not positive.
    """
    for name, limit in {"calls": calls, "size": size, "interval": interval}.items():
        if limit is not None and not limit > 0:
            raise ValueError(f"{name} must be positive, got {limit!r}")
    window = pool.connection_to(worker).window
    window.max_calls = window.max_calls if calls is None else calls
    window.max_bytes = window.max_bytes if size is None else size
    window.trickle_interval = window.trickle_interval if interval is None else interval


async def settled() -> None:
    """Wait until no call, stream or message of this process is in flight, made or served.

    It has no timeout: use `asyncio.timeout`. Await it outside remote calls, which it waits for.

    Raises:
        NotInWorld: if this process is in no world.
    """
    found, sessions = pool.current(), _sessions()
    while sessions.has_work() or any(each.has_work() for _, each in found.connections()):  # noqa: ASYNC110
        await asyncio.sleep(CHECK_INTERVAL)  # threads of torch end a part of it: no event tells


def _info(found: Any) -> ConnectionInfo:
    session = _sessions().get(found.key)
    return ConnectionInfo(
        found.peer.name,
        found.number,
        found.waiting,
        _carrier(found),
        None if session is None else _carrier(session),
        any(_holds_memory(end) for end in (found, session) if end is not None),
    )


def _carrier(end: Any) -> Carrier:
    """Return the carrier of what one end of a connection sends."""
    carriers = end.carriers
    if carriers.chosen is None:
        return "torch"
    return "sockets" if carriers.chosen is carriers.sockets else "shared memory"


def _holds_memory(end: Any) -> bool:
    """Return whether one end of a connection holds memory for large tensors."""
    shared, sockets = end.carriers.shared, end.carriers.sockets
    return bool(
        end.carriers.has_work()
        or shared._held
        or shared._buffers
        or sockets._waiting
        or sockets._reserved
        or len(sockets._incoming)
        or sockets._incoming._held
    )


def _sessions() -> Any:
    node: Any = entry_points.here
    return node.server.sessions
