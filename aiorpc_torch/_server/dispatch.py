"""The calls of a message that came in, as jobs: what each runs, found once for all of a group.

What cannot be read or found is its own calls' answer, and nobody else's. Where a job runs, and
when, is not known here.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._aio.deadlines import deadline_after
from .._protocol.ancestry import BatchId, Errand, received_by
from .._protocol.columns import read
from .._protocol.exceptions import Failure
from .._protocol.messages import Calls, Group, Work
from .._protocol.runtime import runs_on_loop
from .._protocol.targets import Create, order_key, public
from .._torch import rrefs
from .calls import CreateJob, Join, RpcJob, join_of
from .exports import Exports
from .session import Session
from .stream_writer import StreamJob


def arrived(
    message: Calls,
    tensors: Sequence[Tensor],
    session: Session,
    reply: Any,
    worker: str,
    exports: Exports | None = None,
) -> list[RpcJob]:
    """A job for each call of `message`, in their order. Raises if the message makes no sense.

    `reply` answers calls that came by torch RPC; None: their session does.
    """
    if exports is None and not tensors and len(message.numbers) == 1:
        lone = _lone(message, session, reply, worker)
        if lone is not None:
            return [lone]
    if {*map(type, message.budgets)} - _SECONDS:
        raise TypeError("budgets are seconds")  # or the loop could not compare its deadlines
    jobs = []
    rest, most = iter(tensors), len(message.numbers)
    groups = [_Found.of(Group(group, rest, most), exports) for group in message.groups]
    order = message.order or itertools.repeat(0)
    budgets = message.budgets or itertools.repeat(None)
    for number, index, budget in zip(message.numbers, order, budgets, strict=False):
        found = groups[index]
        function, join, work = found.function, found.join, next(found.calls)
        if isinstance(work, Failure):
            function, join, work = work.get, None, _NOTHING
        due = None if budget is None else deadline_after(budget)
        job = found.job(session, reply, number, function, work, due, worker, found.on_loop, join)
        job.key = found.key
        if found.batches:
            job.errand = _errand(received_by(worker, found.batches), session, number)
        jobs.append(job)
    if len(jobs) < most:
        raise ValueError(f"a message of {most} calls has {len(jobs)}")
    return jobs


def _lone(message: Calls, session: Session, reply: Any, worker: str) -> RpcJob | None:
    """The job of a call by itself, as most are; None for one that takes more, or has a mistake."""
    try:
        target, stream, names, _, columns, *batches = message.groups[0]
        ident, name = target
        if stream or names != () or batches or message.budgets or type(ident) is not tuple:
            return None
        function = public(rrefs.find(ident), name)
        args = tuple([read(column, _NO_TENSORS, 1)[0] for column in columns])
        on_loop, join = runs_on_loop(function), join_of(function)
    except BaseException:  # it is raised again, for its caller
        return None
    (number,) = message.numbers
    job = RpcJob(session, reply, number, function, (args, {}), None, worker, on_loop, join)
    job.key = ident
    return job


_NO_TENSORS: Iterator[Tensor] = iter(())

_SECONDS = {float, int, type(None)}


def _errand(batches: frozenset[BatchId], session: Session, number: int) -> Errand:
    # Not a job's own method: a task that the call leaves behind would keep its object alive.
    jobs = session.jobs

    def is_open() -> bool:
        job = jobs.get(number)
        return job is not None and not job.abandoned

    return Errand(batches, is_open)


def unreadable(
    message: Calls, session: Session, reply: Any, worker: str, exc: BaseException
) -> list[RpcJob]:
    """A job that raises `exc` for each call of `message`."""
    function = functools.partial(_raise, exc)
    return [
        RpcJob(session, reply, number, function, ((), {}), None, worker, False)
        for number in message.numbers
    ]


class _Found(NamedTuple):
    """A group whose function is known: what to run, or what raises."""

    function: Callable[..., Any]
    on_loop: bool
    join: Join | None
    job: Callable[..., RpcJob]
    calls: Iterator[Any]
    batches: Sequence[BatchId]
    key: Any = None

    @classmethod
    def of(cls, group: Group, exports: Exports | None) -> "_Found":
        kind: Callable[..., RpcJob] = StreamJob if group.stream else RpcJob
        try:
            target = group.target() if exports is None else group.target(exports.unpack)
            if isinstance(target, Failure):
                target.get()
            found = None if target.on is None else rrefs.find(target.on)
            if exports is not None:
                exports.check(target, found)
            function = target.bind(found)
            join = None if group.stream else join_of(function)
            on_loop = runs_on_loop(function)
        except BaseException as exc:  # not read, not found, not to be called: each call's answer
            group.skip()
            calls = itertools.repeat(_NOTHING)
            return cls(functools.partial(_raise, exc), False, None, kind, calls, ())
        if isinstance(target, Create):
            kind = CreateJob
        found_calls: Iterator[Any] = iter(group.calls())
        return cls(function, on_loop, join, kind, found_calls, group.batches, order_key(target))


_NOTHING: Work = (), {}


def _raise(exc: BaseException, *_: Any, **__: Any) -> None:
    raise exc
