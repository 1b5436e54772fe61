"""The pause of one object, as its worker runs it for `paused`."""

from contextlib import AbstractAsyncContextManager
from typing import Any

from .._torch.compat import RRefBase
from .._torch.rrefs import RRefId, find_object
from .._wire.ancestry import BatchId
from . import entry_points


async def pause_object(named: "RRefBase[Any] | RRefId") -> AbstractAsyncContextManager[BatchId]:
    """Return a block in which an object of this worker is paused.

    It gives the id that the calls of the holder carry.
    """
    server: Any = entry_points.serving()
    if server is None:
        raise entry_points.not_in_world(entry_points.NOT_SERVING)
    return server.pauses.pause(find_object(named))  # type: ignore[no-any-return]
