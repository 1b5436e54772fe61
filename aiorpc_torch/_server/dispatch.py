"""Turn the calls of a message into `RpcCall`s: resolve the target of each group once.

A call that cannot be read or resolved fails alone.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._aio.deadlines import deadline_after
from .._protocol.ancestry import BatchId, BatchScope, from_wire
from .._protocol.exceptions import RemoteFailure
from .._protocol.messages import Arguments, CallGroup, Calls
from .._protocol.targets import CreateTarget, order_key
from .calls import CreateCall, Joiner, RpcCall
from .exclusive_calls import Entrance, ExclusiveCall, ExclusiveStream
from .exports import ExportPolicy
from .methods import LoneMethod, resolve
from .session import Session
from .stream_writer import StreamCall


def calls_of(
    message: Calls,
    tensors: Sequence[Tensor],
    session: Session,
    reply: Any,
    worker: str,
    exports: ExportPolicy | None = None,
) -> list[RpcCall]:
    """Return the calls of `message`, in order. Raises if the message is inconsistent.

    `reply` answers calls that came by torch RPC. If it is None, the session answers.
    """
    calls = []
    rest, count = iter(tensors), len(message.numbers)
    groups = [
        ResolvedTarget.resolve(CallGroup(group, rest, count), exports) for group in message.groups
    ]
    order = message.order or itertools.repeat(0)
    budgets = message.budgets or itertools.repeat(None)
    for number, index, budget in zip(message.numbers, order, budgets, strict=False):
        target = groups[index]
        function, joiner, arguments = target.function, target.joiner, next(target.arguments)
        if isinstance(arguments, RemoteFailure):
            function, joiner, arguments = arguments.raise_, None, _NO_ARGUMENTS
        deadline = None if budget is None else deadline_after(budget)
        call = target.call_type(
            session, reply, number, function, arguments, deadline, worker, target.on_loop, joiner
        )
        call.order_key = target.order_key
        if target.batches:
            call.scope = _batch_scope(from_wire(worker, target.batches), session, number)
        calls.append(call)
    if len(calls) < count:
        raise ValueError(f"a message must have {count} calls, got {len(calls)}")
    return calls


def lone_call(
    session: Session,
    number: int,
    method: LoneMethod,
    args: tuple[Any, ...],
    worker: str,
    exports: ExportPolicy | None = None,
) -> RpcCall:
    """Return the call of a frame of one call. It raises the reason if it cannot be resolved."""
    try:
        function, on_loop, joiner = method.resolve(exports)
    except BaseException as exc:
        function, on_loop, joiner = functools.partial(_raise, exc), False, None
    kind: Callable[..., RpcCall] = RpcCall if type(joiner) is not Entrance else ExclusiveCall
    call = kind(session, None, number, function, (args, {}), None, worker, on_loop, joiner)
    call.order_key = method.target.on
    return call


def _batch_scope(batches: frozenset[BatchId], session: Session, number: int) -> BatchScope:
    # Not a method of the call: tasks that outlive the call would keep its object alive.
    calls = session.calls

    def is_open() -> bool:
        call = calls.get(number)
        return call is not None and not call.is_cancelled

    return BatchScope(batches, is_open)


def failing_calls(
    message: Calls, session: Session, reply: Any, worker: str, exc: BaseException
) -> list[RpcCall]:
    """Return a call that raises `exc` for each call of `message`."""
    function = functools.partial(_raise, exc)
    return [
        RpcCall(session, reply, number, function, ((), {}), None, worker, False)
        for number in message.numbers
    ]


class ResolvedTarget(NamedTuple):
    """The function of a group of calls, or a function that raises the reason why there is none."""

    function: Callable[..., Any]
    on_loop: bool
    joiner: Joiner | Entrance | None
    call_type: Callable[..., RpcCall]
    arguments: Iterator[Any]
    batches: Sequence[BatchId]
    order_key: Any = None

    @classmethod
    def resolve(cls, group: CallGroup, exports: ExportPolicy | None) -> "ResolvedTarget":
        kind: Callable[..., RpcCall] = StreamCall if group.stream else RpcCall
        try:
            target = group.target() if exports is None else group.target(exports.load_target)
            if isinstance(target, RemoteFailure):
                target.raise_()
            function, on_loop, joiner = resolve(target, exports)
        except BaseException as exc:  # each call of the group raises it
            group.skip()
            nothing = itertools.repeat(_NO_ARGUMENTS)
            return cls(functools.partial(_raise, exc), False, None, kind, nothing, ())
        if isinstance(target, CreateTarget):
            kind = CreateCall
        arguments = iter(group.calls())
        key = order_key(target)
        if type(joiner) is Entrance:
            kind = ExclusiveStream if group.stream else ExclusiveCall
        elif group.stream:
            joiner = None
        return cls(function, on_loop, joiner, kind, arguments, group.batches, key)


_NO_ARGUMENTS: Arguments = (), {}


def _raise(exc: BaseException, *_: Any, **__: Any) -> None:
    raise exc
