"""The received calls of a session: from their frames to the executor.

A group of calls becomes `RpcCall`s. Its head is resolved once in a session, and verified at each
group. A call that cannot be read or resolved fails alone. Calls of an object wait for the payload
of an earlier one.
"""

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from sys import modules
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from .._aio.deadlines import deadline_after
from .._context import propagation
from .._context.interception import TRACER, is_needed
from .._endpoint.runtime import runs_on_loop, warn_if_switch_is_void
from .._torch import rrefs
from .._torch.cuda import StreamFence, fence_tensors
from .._torch.profiling import profiler_enabled
from .._torch.rrefs import RRefId
from .._wire.ancestry import BatchId, BatchScope, from_wire
from .._wire.columns import PLAIN, read_cells
from .._wire.exceptions import RemoteFailure
from .._wire.messages import (
    MAX_HEADS,
    MAX_KNOWN_HEAD,
    NO_ARGUMENTS,
    Arguments,
    CallHead,
    Group,
    check_groups,
    numbers_of,
    read_groups,
)
from .._wire.pickling import LongPickle
from .._wire.plain import reader
from .._wire.slots import Slots
from .._wire.staged import OnDevice
from .._wire.targets import CreateTarget, MakeTarget, MethodTarget, Target, order_key
from .._wire.tensors import from_bytes
from .._wire.wire_targets import decode_target
from .calls import CreateCall, Joiner, RpcCall, batch_joiner
from .exclusive import turns_for, unguarded
from .exclusive_calls import Entrance, ExclusiveCall, ExclusiveCreate, ExclusiveStream
from .executor import Executor
from .exports import ExportPolicy
from .reply import complete_reply
from .stream_writer import StreamCall
from .timings import timings

if TYPE_CHECKING:
    from .session import Session

log = logging.getLogger("aiorpc_torch")

_read_control = reader(tuple[list[int], list[tuple[int, int]]])
_read_slot = reader(tuple[int, RRefId | str | None])


class Payload(NamedTuple):
    """A call that came by torch RPC, apart from its slot, and the future of the reply."""

    groups: Sequence[Group]
    tensors: Sequence[Tensor]
    reply: Any
    context: int
    fence: Any


class Dispatcher:
    """The received calls of one session: from their frames to the executor, each in its turn.

    Args:
        session: the session.
        executor: runs the calls.
        exports: what calls may reach, None for everything.

    Attributes:
        calls: those that are not answered, by number.
        slots: those without their payload, and the later ones of their objects.
        heads: of groups of calls, by their bytes.
        served: number of calls received.
    """

    def __init__(
        self, session: "Session", executor: Executor, exports: ExportPolicy | None
    ) -> None:
        self.calls: dict[int, RpcCall] = {}
        self.slots: Slots[Any] = Slots()
        self.heads: dict[bytes, KnownHead] = {}
        self.served = 0
        self._session = session
        self._executor = executor
        self._exports = exports

    # ── frames ──────────────────────────────────────────────────────────────────────────────────

    def on_calls(self, data: bytes, tensors: Sequence[Tensor] = ()) -> int:
        """Start the calls of a frame, in order; return their number.

        `tensors` are those that came outside the bytes.
        """
        groups = read_groups(data)
        if len(groups) != 1 or len(groups[0].numbers) != 1 or groups[0].budgets:
            check_groups(groups)
        elif self._start_simply(groups[0]):
            return 1
        return self._start(groups, tensors)

    def on_slot(self, data: bytes) -> int:
        """Hold back the later calls of an object until a payload is there."""
        number, key = _read_slot(data)
        self._start_held(self.slots.open(number, key))
        return 1

    def on_control(self, data: bytes) -> int:
        """Cancel calls, and let streams go on."""
        cancels, grants = _read_control(data)
        for number in cancels:
            self._start_held(self.slots.drop(number))
            self._session.release(number)
            if (call := self.calls.get(number)) is not None:
                self._executor.cancel(call)
            if (held := self.slots.take(number)) is not None:  # waits for another payload
                self._drop_held(held)
        for number, credit in grants:
            if (call := self.calls.get(number)) is not None:
                call.grant(credit)
        return len(cancels) + len(grants)

    def on_payload(self, number: int, payload: Payload) -> None:
        """Handle a payload that came by torch RPC."""
        ready = None if self._session.ended.is_set() else self.slots.fill(number, payload)
        if ready is None:  # cancelled by the caller
            complete_reply(payload.reply, ())
        else:
            self._start_held(ready)

    def close(self) -> None:
        """End the calls that were held back."""
        for item in self.slots.close():
            self._drop_held(item)

    # ── calls that may start ────────────────────────────────────────────────────────────────────

    def _start_simply(self, group: Group) -> bool:
        """Start a lone call of an `async def` with one argument; return whether it was started.

        As `_start`, `calls_of` and `Executor.start`, in 12,000 instructions less. Any other
        call is for them, and what cannot be read.
        """
        data, (number,), columns, _, batches, carried = group
        head, executor = self.heads.get(data), self._executor
        # Was its method found for an earlier call? Is nothing else sent with it? May calls start,
        # and does no earlier one hold it back?
        if head is None or not head.is_simple or batches or carried or len(columns) != 1:
            return False
        if executor.refusal or executor.holds or self.slots.queues or number in self.calls:
            return False
        # Is it recorded, or is an interceptor told of it?
        if timings.is_on or profiler_enabled():
            return False
        if (propagation.used or TRACER in modules) and is_needed():
            return False
        (column,), kind, session = columns, head.wire.only_kind, self._session
        try:
            # As `head.method()`: is the method that of the last call, and of its object?
            if (owner := head.object()) is None:
                return False
            function = getattr(owner, head.target.name, None)
            if type(function) is not MethodType or function.__func__ is not head.function:
                return False
            if type(column) is bytes:
                value: Any = from_bytes(kind, column, 1)[0]
            elif kind == PLAIN and len(column) == 1:
                value = column[0]
            else:
                return False
            now = time.monotonic()
            row: Arguments = (value,), {}
            call = RpcCall(session, None, number, now, function, row, True, None, head.key)
        except BaseException:  # user code's, or malformed: the other way answers the call with it
            return False
        self.calls[number] = call
        self.served += 1
        executor.start_task(call, head.name)
        return True

    def _start(
        self,
        groups: Sequence[Group],
        tensors: Sequence[Tensor],
        reply: Any = None,
        fence: StreamFence | None = None,
    ) -> int:
        """Start the calls of a message, in order; return their number.

        Args:
            tensors: Those that came outside the bytes.
            reply: Answers a call that came by torch RPC; its turn has come already.
            fence: Is awaited in the thread that uses the tensors.
        """
        numbers = groups[0].numbers if len(groups) == 1 else numbers_of(groups)
        running = self.calls
        if not running.keys().isdisjoint(numbers):
            raise ValueError("a message has the number of a call that is already running")
        self.served += len(numbers)
        now = time.monotonic()
        try:
            calls = self.calls_of(groups, tensors, reply, now)
        except BaseException as exc:  # later calls of the session must still be served
            log.warning("calls from worker %r cannot be read: %r", self._session.caller, exc)
            calls = self._failing(numbers, reply, now, exc)
        for call in calls:
            running[call.number] = call
        if fence is not None:  # else a call may have its own
            for call in calls:
                call.fence = fence
        if timings.is_on or profiler_enabled():
            for call in calls:
                call.record()
        if (propagation.used or TRACER in modules) and is_needed():
            for call in calls:
                call.carried = call.carried or ()  # interceptors are told of it
        if tensors:
            calls = [e for e in calls if type(e.arguments) is not LongPickle or not self._load(e)]
        if reply is None and self.slots.queues:
            calls = [call for call in calls if self.slots.admit(call.order_key, call)]
        self._executor.start(calls)
        return len(numbers)

    def _load(self, call: RpcCall) -> bool:
        """Load a `LongPickle` in a thread, before its call is started; return whether it is.

        Later calls of its object wait for it. One that came by torch has had its turn.
        """
        pickled, call.arguments = call.arguments, NO_ARGUMENTS
        if call.reply is not None:
            _set_arguments(call, pickled.load())
            return False

        def start(arguments: Any) -> None:
            _set_arguments(call, arguments)
            is_over = self._session.ended.is_set()
            ready = None if is_over else self.slots.fill(call.number, call)
            self._start_held((call,) if ready is None else ready)  # a cancelled one is answered

        self._start_held(self.slots.open(call.number, call.order_key))
        pickled.load_in_thread(asyncio.get_running_loop(), start)
        return True

    # ── calls that waited for a payload ─────────────────────────────────────────────────────────

    def _start_held(self, items: Iterable[Any]) -> None:
        for item in items:
            if not isinstance(item, Payload):
                self._executor.start((item,))
            elif item.groups[0].numbers[0] in self.calls:
                complete_reply(item.reply, ())  # the caller repeated a number
            else:
                if item.fence is not None:  # before user code that unpickles the arguments
                    item.fence.wait()
                self._start(item.groups, item.tensors, item.reply, item.fence)

    def _drop_held(self, item: Any) -> None:
        """End a cancelled call that was held back; torch awaits the reply of a payload."""
        if isinstance(item, Payload):
            complete_reply(item.reply, ())
        else:
            self._executor.start((item,))

    # ── calls from groups ───────────────────────────────────────────────────────────────────────

    def calls_of(
        self, groups: Sequence[Group], tensors: Sequence[Tensor], reply: Any, now: float
    ) -> list[RpcCall]:
        """Return the calls of a message, in order. Raises if the message is inconsistent.

        `reply` answers calls that came by torch RPC. If it is None, the session answers. `now` is
        the `time.monotonic()` of their arrival.
        """
        session, rest = self._session, iter(tensors)
        calls: list[RpcCall] = []
        for group in groups:
            data, numbers, columns, budgets, batches, carried = group
            head, before = self.heads.get(data), len(calls)
            if head is None:
                head = self._new_head(data)
            wire = head.wire
            try:
                function, on_loop, joiner, make = head.resolve(rest, self._exports)
            except BaseException as exc:  # each call of the group raises it
                wire.skip(group, rest)
                calls += self._failing(numbers, reply, now, exc, stream=wire.stream)
                continue
            only_kind = wire.only_kind
            if only_kind is not None and len(columns) == 1:  # one argument each
                if type(columns[0]) is bytes:  # a small tensor, the common case
                    values: list[Any] = from_bytes(only_kind, columns[0], len(numbers))
                else:
                    values = read_cells(only_kind, columns[0], rest, len(numbers))
                rows: list[Any] = [((value,), {}) for value in values]
            else:
                rows = wire.rows(group, rest)
            key = head.key
            for number, row in zip(numbers, rows):  # noqa: B905 - 0.2 µs
                if type(row) is RemoteFailure:
                    failing = _failing_class(stream=wire.stream)
                    how = row.raise_, NO_ARGUMENTS, on_loop, None, key
                    call = failing(session, reply, number, now, *how)
                else:
                    call = make(session, reply, number, now, function, row, on_loop, joiner, key)
                    if type(row) is OnDevice:
                        call.arguments, call.fence = row.value, fence_tensors(row.tensors)
                calls.append(call)
            if budgets or batches or carried:
                self._bound(calls[before:], group)
        if len(groups) > 1:
            calls.sort(key=attrgetter("number"))
        return calls

    def _new_head(self, data: bytes) -> "KnownHead":
        head = KnownHead(data)
        # What is pickled differs from call to call, and so does a fork of an RRef.
        target = head.wire.target
        differs = isinstance(target, bytes) or isinstance(target.on, bytes)
        if not differs and len(data) <= MAX_KNOWN_HEAD:
            if len(self.heads) >= MAX_HEADS:
                self.heads.clear()
            self.heads[data] = head
        return head

    def _bound(self, calls: Sequence[RpcCall], group: Group) -> None:
        """Give calls their deadlines, the batches that wait for them, and their variables."""
        for call, budget in zip(calls, group.budgets, strict=False):  # as many, or none
            call.deadline = None if budget is None else deadline_after(budget)
        for call in calls if group.batches else ():
            batches = from_wire(self._session.worker, group.batches)
            call.scope = _batch_scope(batches, self.calls, call.number)
        for call in calls if group.carried else ():
            call.carried = group.carried

    def _failing(
        self,
        numbers: Sequence[int],
        reply: Any,
        now: float,
        exc: BaseException,
        *,
        stream: bool = False,
    ) -> list[RpcCall]:
        """Return a call that raises `exc` for each number."""
        failing, how = _failing_class(stream=stream), (partial(_raise, exc), NO_ARGUMENTS, False)
        return [failing(self._session, reply, number, now, *how) for number in numbers]


def _set_arguments(call: RpcCall, arguments: Any) -> None:
    """Set the arguments of a call, which only raises if they could not be unpickled."""
    if type(arguments) is RemoteFailure:
        call.function = arguments.raise_
        call.joiner = None  # it joins no batch
    else:
        call.arguments = arguments


def _batch_scope(batches: frozenset[BatchId], calls: dict[int, RpcCall], number: int) -> BatchScope:
    # Open until the call is answered or cancelled: a task that outlives the call may call the queue
    # again. (tests/loopback/test_self_waiting_batches.py)
    # Not a method of the call: such tasks would keep its object alive.
    def is_open() -> bool:
        call = calls.get(number)
        return call is not None and not call.is_cancelled

    return BatchScope(batches, is_open)


def _failing_class(*, stream: bool) -> Callable[..., RpcCall]:
    """Return the class of a call that only raises: it joins no batch, and takes no turn."""
    return StreamCall if stream else RpcCall


def _raise(exc: BaseException, *_: Any, **__: Any) -> None:
    raise exc


# ── heads ─────────────────────────────────────────────────────────────────────────────────────────


Resolved = tuple[Callable[..., Any], bool, Joiner | None, Callable[..., RpcCall]]
"""The function of a group of calls, whether it starts on the loop, how its calls join a batch, and
what makes them: their class, or a partial of one with the `Entrance` to their object."""


class KnownHead:
    """The head of groups of calls, read once in a session, and the method that it named last.

    It refers to the object weakly. While the object and its function are those of the last call, no
    other look-up is needed.

    Attributes:
        wire: the head as it was read.
        target: its target, as it was sent.
        key: of the object or function, whose calls stay in order.
        object: returns the object of the last call; None if it is gone or not remembered.
        function: function of the method that was found then.
        name: its name, "" if it has none.
        is_simple: whether that is an `async def` without turns or batches, for one small argument.
    """

    __slots__ = (
        *("_join", "_make", "_on_loop", "function", "is_simple", "key", "name", "object"),
        *("target", "wire"),
    )

    def __init__(self, data: bytes) -> None:
        self.wire = CallHead(data)
        self.target: Any = self.wire.target
        self.key: Any = None
        self.object: Callable[[], Any] = _nothing
        self.function: Any = None
        self.name = ""
        self._on_loop = False
        self._join: Callable[..., Any] | None = None
        self._make: Callable[..., RpcCall] = RpcCall
        self.is_simple = False

    def method(self) -> MethodType | None:
        """Return the method if object and function are those of the last call, else None.

        Raises what user code raises.
        """
        if (owner := self.object()) is not None:
            function = getattr(owner, self.target.name, None)
            if type(function) is MethodType and function.__func__ is self.function:
                return function
        return None

    def resolve(self, tensors: Iterator[Tensor], exports: ExportPolicy | None) -> Resolved:
        """Return the function of a group; take the tensors of its target.

        Raises an exception of any class if the object is gone, the call is not exported, or user
        code raises.
        """
        if (function := self.method()) is not None:
            join = self._join
            # Its own object's batches: it may be a method of another object.
            joiner = None if join is None else partial(join, function.__self__)
            return function, self._on_loop, joiner, self._make
        return self._look_up(self.wire.tensors_of_target(tensors), exports)

    def _look_up(self, tensors: Sequence[Tensor], exports: ExportPolicy | None) -> Resolved:
        """Decode the target, find its object and function, and remember them for `method`."""
        decode = decode_target if exports is None else exports.load_target
        target: Any = decode(self.target, tensors, self.wire.target_outside)
        if isinstance(target, RemoteFailure):
            target.raise_()
        self.key, self.object, self.is_simple = order_key(target), _nothing, False
        owner = None if target.on is None else rrefs.find_object(target.on)
        found = _resolve_on(owner, target, exports, self.wire.stream)
        function: Any = found[0]
        _, on_loop, joiner, make = found
        is_method = isinstance(target, MethodTarget) and type(function) is MethodType
        if is_method and function.__self__ is owner and not isinstance(make, partial):
            with contextlib.suppress(TypeError):  # its class has no weak references
                self.object = weakref.ref(owner)
            self.function, self._on_loop, self._make = function.__func__, on_loop, make
            self.name = getattr(function, "__qualname__", "")
            self._join = None if joiner is None else joiner.func
            is_small = type(self.wire.only_kind) is tuple or self.wire.only_kind == PLAIN
            self.is_simple = is_small and on_loop and joiner is None and make is RpcCall
        return found


def _resolve_on(owner: Any, target: Target, exports: ExportPolicy | None, stream: bool) -> Resolved:
    if exports is not None:
        exports.check(target, owner)
    function = target.bind(owner)
    on_loop, joiner = runs_on_loop(function), batch_joiner(function, stream=stream)
    if hasattr(function, "__wrapped__"):
        warn_if_switch_is_void(function)
    makes = isinstance(target, CreateTarget | MakeTarget)
    # A batch takes the turn when it runs. If its calls took it when they join, each would wait for
    # the batch of the one before.
    if joiner is None and (turns := turns_for(owner, function)) is not None:
        entrance = Entrance(turns, on_loop)
        exclusive = ExclusiveStream if stream else ExclusiveCreate if makes else ExclusiveCall
        return unguarded(function), True, None, partial(exclusive, entrance)
    if makes:
        return function, on_loop, joiner, CreateCall
    if stream:
        return function, on_loop, joiner, StreamCall
    return function, on_loop, joiner, RpcCall


def _nothing() -> None:
    """Return no object: none is remembered."""
