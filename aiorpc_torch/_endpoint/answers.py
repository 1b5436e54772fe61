"""Answers of a worker to others, for this library alone: pauses, and where blocks stand."""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from .._torch.compat import RRefBase
from .._torch.rrefs import RRefId, find_object
from .._wire.ancestry import BatchId, CallKey, from_wire
from . import entry_points

if TYPE_CHECKING:
    from .._node.node import Node


async def pause_object(
    named: "RRefBase[Any] | RRefId", mark: BatchId, own: CallKey | None, enters: bool
) -> AbstractAsyncContextManager[BatchId]:
    """Return a block in which an object of this worker is paused, as `Pauses.pause`."""
    node = _node()
    (here,) = from_wire(node.server.name, (mark,))
    return node.server.pauses.pause(find_object(named), here, own, enters=enters)


async def settle_pause(named: "RRefBase[Any] | RRefId", enters: bool) -> int:
    """Wait for what has passed since the pause of an object has begun, as `Pauses.settle`."""
    return await _node().server.pauses.settle(find_object(named), enters=enters)


async def block_of(connection: int, data: bytes) -> bytes:
    """Return where the call stands whose block a call of this process has entered."""
    return await _node().block_of(connection, data)


def _node() -> "Node":
    if (node := entry_points.here) is None:
        raise entry_points.not_in_world(entry_points.NOT_SERVING)
    return node
