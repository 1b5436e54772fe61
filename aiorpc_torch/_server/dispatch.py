"""Turn groups of calls into `RpcCall`s. A call that cannot be read or resolved fails alone."""

import functools
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from .._aio.deadlines import deadline_after
from .._wire.ancestry import BatchId, BatchScope, from_wire
from .._wire.exceptions import RemoteFailure
from .._wire.messages import MAX_HEADS, MAX_KNOWN_HEAD, Group
from .calls import RpcCall
from .exports import ExportPolicy
from .methods import KnownHead
from .session import Session
from .stream_writer import StreamCall


def calls_of(
    groups: Sequence[Group],
    tensors: Sequence[Tensor],
    session: Session,
    reply: Any,
    worker: str,
    exports: ExportPolicy | None = None,
) -> list[RpcCall]:
    """Return the calls of a message, in order. Raises if the message is inconsistent.

    `reply` answers calls that came by torch RPC. If it is None, the session answers.
    """
    rest = iter(tensors)
    calls = _calls_in(groups[0], rest, session, reply, worker, exports)
    if len(groups) > 1:
        for group in groups[1:]:
            calls += _calls_in(group, rest, session, reply, worker, exports)
        calls.sort(key=attrgetter("number"))
    return calls


def _calls_in(
    group: Group,
    tensors: Iterator[Tensor],
    session: Session,
    reply: Any,
    worker: str,
    exports: ExportPolicy | None,
) -> list[RpcCall]:
    head, numbers = session.heads.get(group.head), group.numbers
    if head is None:
        head = _new_head(session, group.head)
    try:
        function, on_loop, joiner, kind = head.resolve(tensors, exports)
    except BaseException as exc:  # each call of the group raises it
        head.wire.skip(group, tensors)
        return failing_calls(numbers, session, reply, worker, exc, stream=head.wire.stream)
    calls, key = [], head.key
    for number, row in zip(numbers, head.wire.rows(group, tensors)):  # noqa: B905 - 0.2 µs
        if type(row) is RemoteFailure:
            failing = _failing_kind(stream=head.wire.stream)
            work = row.raise_, _NOTHING
            call = failing(session, reply, number, *work, worker, on_loop, None, key)
        else:
            call = kind(session, reply, number, function, row, worker, on_loop, joiner, key)
        calls.append(call)
    if group.budgets or group.batches or group.carried:
        _bound(calls, group, session, worker)
    return calls


def _bound(calls: Sequence[RpcCall], group: Group, session: Session, worker: str) -> None:
    """Give calls their deadlines, the batches that wait for them, and their context variables."""
    for call, budget in zip(calls, group.budgets, strict=False):  # as many, or none
        call.deadline = None if budget is None else deadline_after(budget)
    for call in calls if group.batches else ():
        call.scope = _batch_scope(from_wire(worker, group.batches), session, call.number)
    for call in calls if group.carried else ():
        call.carried = group.carried


def _new_head(session: Session, data: bytes) -> KnownHead:
    head = KnownHead(data)
    # What is pickled differs from call to call, and so does a fork of an RRef.
    target = head.wire.target
    differs = isinstance(target, bytes) or isinstance(target.on, bytes)
    if not differs and len(data) <= MAX_KNOWN_HEAD:
        if len(session.heads) >= MAX_HEADS:
            session.heads.clear()
        session.heads[data] = head
    return head


def _batch_scope(batches: frozenset[BatchId], session: Session, number: int) -> BatchScope:
    # Open until the call is answered or cancelled: a task that outlives the call may call the queue
    # again. (tests/loopback/test_self_waiting_batches.py)
    # Not a method of the call: such tasks would keep its object alive.
    calls = session.calls

    def is_open() -> bool:
        call = calls.get(number)
        return call is not None and not call.is_cancelled

    return BatchScope(batches, is_open)


def failing_calls(
    numbers: Sequence[int],
    session: Session,
    reply: Any,
    worker: str,
    exc: BaseException,
    *,
    stream: bool = False,
) -> list[RpcCall]:
    """Return a call that raises `exc` for each number."""
    kind = _failing_kind(stream=stream)
    function = functools.partial(_raise, exc)
    return [kind(session, reply, number, function, _NOTHING, worker, False) for number in numbers]


def _failing_kind(*, stream: bool) -> Callable[..., RpcCall]:
    """Return the class of a call that only raises: it joins no batch, and takes no turn."""
    return StreamCall if stream else RpcCall


_NOTHING: Any = (), {}


def _raise(exc: BaseException, *_: Any, **__: Any) -> None:
    raise exc
