"""The public function `lookup`: find an object by its name."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from .._aio.deadlines import deadline_in, in_seconds, time_left
from .._aio.waiting import LOG_DELAY, announced
from .._endpoint.names import watch_name
from .._torch.compat import RRef, RRefBase
from .._wire.targets import FunctionTarget
from ..errors import CallTimeout, RemoteError, WorkerGone
from .answers import is_interrupted
from .call import RemoteCall
from .named_members import members
from .pool import ConnectionPool, WorkerRef, current


async def lookup(name: str, *, on: WorkerRef | None = None) -> RRef[Any]:
    """Return an RRef of the object that a living worker has registered as `name`.

    It waits until a worker registers the name, within the deadline of `aiorpc.timeout`. Without a
    deadline, the log warns once after 10 s that it waits. Workers answer whatever their `exports`
    are. Each lookup asks every worker: in a loop keep its result until a call raises `WorkerGone`,
    or keep `members(name)`, which is told of changes.

    Args:
        name: name given to `register`. If several workers have an object of that name, the result
            is one of these: `members(name)` has all.
        on: worker that registers it, by name, rank or WorkerInfo (default: any). If that worker is
            lost, its replacement process is waited for.

    Raises:
        CallTimeout: if the name is not registered in time.
        WorkerLost: if worker `on` is lost, and no replacement process will come.
        WorkerLeft: if worker `on` has left.
        UnknownWorker: if there is no worker `on`.
        NotInWorld: outside a world, or once this worker leaves it.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name must be a str, got {name!r}")
    pool, due = current(), deadline_in(None)
    worker = None if on is None else pool.find(on)
    # Which worker would register the object is unknown, so its death ends no lookup.
    level = logging.WARNING if due is None else logging.DEBUG
    who = "a living worker" if worker is None else f"worker {worker!r}"
    text = f"the lookup of {name!r} waits until {who} registers it"
    with announced(text, level, LOG_DELAY):
        if worker is None:
            return await _find_anywhere(name, due)
        return await _find(pool, worker, name, due)


async def _find_anywhere(name: str, due: float | None) -> RRef[Any]:
    seconds, found = time_left(due), members(name)
    while True:
        try:
            await found.wait()
        except CallTimeout as exc:
            limit = "" if seconds is None else f" after {in_seconds(seconds)}"
            text = f"lookup of {name!r} timed out{limit}; no living worker has registered it"
            raise CallTimeout(text, method="lookup") from exc
        for rref in found:  # unless the last one has gone since
            return rref


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
        except WorkerGone as exc:
            if not is_interrupted(exc):
                raise
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
            await pool.observer.wait_until_alive(worker)
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
