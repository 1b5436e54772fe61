"""The pause of one object, as its worker runs it for `paused`."""

from contextlib import AbstractAsyncContextManager
from typing import Any

from .._torch.compat import RRefBase
from .._torch.rrefs import RRefId, find_object
from .._wire.ancestry import BatchId, CallKey, from_wire
from . import entry_points


async def pause_object(
    named: "RRefBase[Any] | RRefId", mark: BatchId, own: CallKey | None, enters: bool
) -> AbstractAsyncContextManager[BatchId]:
    """Return a block in which an object of this worker is paused, as `Pauses.pause`."""
    server = _server()
    (here,) = from_wire(server.name, (mark,))
    return server.pauses.pause(find_object(named), here, own, enters=enters)  # type: ignore[no-any-return]


async def settle_pause(named: "RRefBase[Any] | RRefId", enters: bool) -> int:
    """Wait for what has passed since the pause of an object has begun, as `Pauses.settle`."""
    return await _server().pauses.settle(find_object(named), enters=enters)  # type: ignore[no-any-return]


def _server() -> Any:
    if (server := entry_points.serving()) is None:
        raise entry_points.not_in_world(entry_points.NOT_SERVING)
    return server


ALWAYS_EXPORTED = pause_object, settle_pause
"""What `paused` calls: every worker answers, whatever it exports."""
