"""The public function `lookup`: find an object by its name on a worker."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from torch.distributed.rpc import RRef

from .._aio.deadlines import checked_timeout, deadline_in, in_seconds, time_left
from .._aio.waiting import LOG_DELAY, announced
from .._protocol.names import watch_name
from .._torch.compat import RRefBase
from .._wire.targets import FunctionTarget
from ..errors import CallTimeout, RemoteError, WorkerLost
from .call import RemoteCall
from .pool import ConnectionPool, WorkerRef, current


async def lookup(name: str, *, on: WorkerRef, timeout: float | None = 60.0) -> RRef[Any]:
    """Return an RRef of the object that worker `on` has registered as `name`.

    It waits until the worker registers the name. If the worker is lost, it waits until a
    replacement process registers it. The worker answers whatever its `exports` are.

    Args:
        name: name given to `register`.
        on: worker that registers it, by name, rank or WorkerInfo.
        timeout: seconds; None for no bound but `aiorpc.timeout`'s. Without any, the log warns once
            after 10 s that the lookup waits.

    Raises:
        CallTimeout: if the name is not registered in time; it lists the names that are.
        WorkerLost: if the worker is lost, and no replacement process will come.
        ValueError: if there is no such worker.
        WorkerLeft: if the worker has left.
        NotInWorld: outside a world.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name must be a str, got {name!r}")
    pool = current()
    worker, due = pool.find(on), deadline_in(checked_timeout(timeout))
    # Which worker would register the object is unknown, so its death ends no lookup.
    level = logging.WARNING if due is None else logging.DEBUG
    text = f"the lookup of {name!r} on worker {worker!r} waits until it is registered there"
    with announced(text, level, LOG_DELAY):
        return await _find(pool, worker, name, due)


async def _find(pool: ConnectionPool, worker: str, name: str, due: float | None) -> RRef[Any]:
    seconds = time_left(due)  # the scope's deadline may be earlier
    names: list[str] | None = None
    while True:
        watch = RemoteCall(worker, FunctionTarget(watch_name), time_left(due), name)
        try:
            async for found in watch:
                if isinstance(found, RRefBase):
                    return found  # type: ignore[return-value]
                names = found
            raise RemoteError(f"worker {worker!r} ended the lookup of {name!r}")
        except WorkerLost:
            late = await _wait_until_alive(pool, worker, due)
        except CallTimeout as exc:
            late = exc
        if late is not None:
            raise _timed_out(name, worker, names, seconds) from late


async def _wait_until_alive(
    pool: ConnectionPool, worker: str, due: float | None
) -> TimeoutError | None:
    """Wait until a lost worker has rejoined; return TimeoutError if it has not by `due`."""
    try:
        async with asyncio.timeout(time_left(due)):
            await pool.wait_until_alive(worker)
    except TimeoutError as exc:
        return exc
    return None


def _timed_out(
    name: str, worker: str, names: Sequence[str] | None, seconds: float | None
) -> CallTimeout:
    limit = "" if seconds is None else f" after {in_seconds(seconds)}"
    found = "it has not answered" if names is None else f"registered there: {_listed(names)}"
    text = f"lookup of {name!r} on worker {worker!r} timed out{limit}; {found}"
    return CallTimeout(text, worker=worker, method="lookup")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
