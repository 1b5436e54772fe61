"""One call that this worker runs for a caller.

A call ends with `succeed` or `fail`, whichever comes first. A later end is ignored.
"""

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import Callable
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._aio.deadlines import set_deadline
from .._aio.tasks import Steps, take_step
from .._context.interception import CallInfo, End, Kind, enter_call
from .._context.recording import ContextRecord, enter_record
from .._handles.mistakes import await_hint
from .._text import printable
from .._torch.compat import make_rref
from .._torch.cuda import StreamFence
from .._torch.devices import check_sendable
from .._torch.profiling import call_event, profiler_enabled
from .._wire.ancestry import BatchScope, enter_scopes, note_call
from .._wire.columns import (
    FAILED,
    PACKED,
    PLAIN,
    SharedValue,
    cell_tensors,
    direct_cell,
    plain_cell,
)
from .._wire.exceptions import RemoteFailure, note_has_run, try_add_note
from .._wire.messages import NO_ARGUMENTS, Arguments, Carried
from .._wire.pickling import pack
from .._wire.staged import stage
from .._wire.targets import GENERATOR_HINT, function_name
from .._wire.tensors import small_tensor
from ..errors import WorkerLost
from .reply import DeferredReply
from .timings import timings

if TYPE_CHECKING:
    from .session import Session

_NOT_CALLED = object()

Joiner = functools.partial[Callable[[], object]]
"""Adds a call to a batch, given its `settle`, receiver of items, arguments and caller; returns how
to remove it. Its function has the instance as first argument."""


class ServerCall:
    """A call of `function` for a caller. `deadline` is a `time.monotonic()` value."""

    arguments: Any  # `Arguments`; before the start also a `LongPickle`, which is loaded first

    # Set by each subclass.
    on_loop: bool  # whether its function starts on the loop
    worker: str  # name of this worker
    caller: str  # name of the calling worker
    started: float  # `time.monotonic()` of its arrival

    # Defaults of the class, which cost a call nothing.
    is_cancelled = has_started = False
    has_sent = False  # whether an item of a stream has been sent
    why_lost: str | None = None  # set if it is cancelled because its caller was lost
    task: asyncio.Task[None] | None = None  # set while it runs on the loop
    session: "Session | None" = None  # None for a call of a torch client
    number = -1  # that of its caller
    joiner: Joiner | None = None  # of a batched function
    deadline: float | None = None
    leave_queue: Callable[[], object] | None = None  # out of its batch, or the queue of a turn
    scope: BatchScope | None = None  # batches that wait for it
    fence: StreamFence | None = None  # until its arguments are ready
    recording: ContextRecord | None = None  # set in an autograd context
    carried: Carried | None = None  # its context variables, until its context is entered
    on_end: End | None = None  # of interceptors
    kind: Kind = "call"
    receiver: Any = None  # of items: a stream itself

    def __init__(self, function: Callable[..., Any], arguments: Arguments) -> None:
        self.function = function
        self.arguments = arguments

    @property
    def name(self) -> str:
        """Return the function's name, which a peer has chosen if it travels by value."""
        name = getattr(self.function, "__qualname__", None)  # e.g. a partial has none
        return printable(name) if isinstance(name, str) else function_name(self.function)

    def cancel(self) -> None:
        """Stop the call as far as possible. On the loop's thread."""
        self.is_cancelled = True
        if self.leave_queue is not None:
            self.leave_queue()
            self.fail(asyncio.CancelledError())
        elif self.task is not None and self.has_started:  # else it ends when it starts
            self.task.cancel()

    def is_past_deadline(self) -> bool:
        """Return whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def is_given_up(self) -> bool:
        """Return whether the caller has left, or is late. In any thread."""
        return self.is_cancelled or self.is_past_deadline()

    async def run(self, name: str, value: Any = _NOT_CALLED) -> None:
        """Run the call to its end, in a task.

        Each waiting call keeps one such frame, so it stays small: there may be 100,000. If the
        function ran in a thread, `value` is the awaitable that it has returned.
        """
        self.has_started = True
        if self.is_cancelled:
            if value is _NOT_CALLED:
                self.fail(asyncio.CancelledError())
                return
            if task := asyncio.current_task():
                task.cancel()  # the coroutine sees it at its first await
        try:
            if value is _NOT_CALLED:
                value = self.invoke()
            if type(value) is CoroutineType:  # the common case
                # The first step is taken here: a call that never waits needs no `Steps`.
                has_ended, found = take_step(value.send, None, name)
                if has_ended:
                    value = found
                else:  # a frame that kept the future would keep its result
                    value, found = Steps(value, name, found), None
                    value = await value
            elif inspect.isawaitable(value):
                value = await value
            if self.kind == "stream":
                await self.pump(value)
        except BaseException as exc:  # a KeyboardInterrupt must not end the serving loop
            note_has_run(exc)
            self.fail(exc)
        else:
            self.succeed(value)

    async def pump(self, value: Any) -> None:
        """Send the items of what the function of a stream has returned."""
        raise NotImplementedError

    def invoke(self) -> Any:
        """Run the function in the current thread and context."""
        if self.session is not None:
            note_call((self.session.key, self.number))
        if self.deadline is not None:
            set_deadline(self.deadline)
        if self.scope is not None or self.recording is not None or self.carried is not None:
            self.enter_context()
        if self.fence is None:  # as `take_arguments`, without another function for each call
            (args, kwargs), self.arguments = self.arguments, NO_ARGUMENTS
        else:
            args, kwargs = self.take_arguments()
        return self.function(*args, **kwargs)

    def join(self, joiner: Joiner) -> None:
        """Join a batch, in the current context."""
        try:
            if self.scope is not None or self.recording is not None or self.carried is not None:
                self.enter_context()
            if self.fence is None:  # as in `invoke`
                arguments, self.arguments = self.arguments, NO_ARGUMENTS
            else:
                arguments = self.take_arguments()
            self.leave_queue = joiner(self.settle, self.receiver, arguments, self.caller)
        except BaseException as exc:  # raised by user code
            self.fail(exc)

    def enter_context(self) -> None:
        """Make the current context a part of the call."""
        if self.scope is not None:
            enter_scopes(frozenset((self.scope,)))
        if self.recording is not None:
            enter_record(self.recording)
        if self.carried is not None:
            carried, self.carried = self.carried, None
            info = CallInfo(self.kind, self.name, self.worker, self.caller, self.started)
            if (end := enter_call(info, carried)) is not None:
                self.observe(end)

    def observe(self, end: End) -> None:
        """Call `end` when this call has ended."""
        self.on_end = end

    def take_arguments(self) -> Arguments:
        """Return the arguments and release them, so that a long call does not keep them alive.

        Call it once, in the thread that uses the arguments: their CUDA events are awaited here.
        """
        if self.fence is not None:
            self.fence.wait()
            self.fence = None
        arguments: Arguments = self.arguments
        self.arguments = NO_ARGUMENTS
        return arguments

    def settle(self, answer: Any) -> None:
        """End with the result of a batch: a value, or an exception to raise."""
        if isinstance(answer, BaseException):
            self.fail(answer)
        else:
            self.succeed(answer)

    def abandon(self, exc: BaseException) -> None:
        """Answer the caller with an exception, although the function may still run."""
        if self.leave_queue is not None:  # `cancel` cannot, once it is answered
            self.leave_queue()
        self.fail(exc)

    def succeed(self, value: Any) -> None:
        """End with a return value."""
        raise NotImplementedError

    def fail(self, exc: BaseException) -> None:
        """End with an exception."""
        raise NotImplementedError


class RpcCall(ServerCall):
    """Call `number` of a session. `reply` is set if the call came by torch RPC."""

    session: "Session"
    sends_value = True  # its result is what the function returns

    def __init__(
        self,
        session: "Session",
        reply: Any,
        number: int,
        now: float,
        function: Callable[..., Any],
        arguments: Arguments,
        on_loop: bool,
        joiner: Joiner | None = None,
        order_key: Any = None,  # of its object, whose calls stay in order
    ) -> None:
        self.function, self.arguments, self.order_key = function, arguments, order_key
        self.session, self.reply, self.number = session, reply, number
        self.worker, self.caller = session.worker, session.caller
        self.on_loop, self.started = on_loop, now
        if joiner is not None:
            self.joiner = joiner
        if type(reply) is DeferredReply:
            self.recording = reply.recording

    def record(self) -> None:
        """Record this call until it is answered: for a profiler, and for `top`. On the loop."""
        name, event = self.name, None
        if profiler_enabled():
            event = call_event("serve", name, self.caller, self.worker)
        self.session.events[self.number] = timings.record(name, self.started, event)

    def grant(self, credit: int) -> None:
        """Add stream credit. Ignored unless the call is a stream."""

    def observe(self, end: End) -> None:
        self.on_end = end
        if self.number not in self.session.calls:  # answered before a thread was free
            end(asyncio.CancelledError())

    def succeed(self, value: Any) -> None:
        small = None  # as `_encode` and `_finish`, for the results that most calls have
        try:
            if self.reply is None and self.sends_value and not self.is_cancelled:
                small = small_tensor(value) if type(value) is Tensor else plain_cell(value)
            kind, content = small or self._encode(value)
        except BaseException as exc:  # pickling a user's object may raise anything
            self.fail(_explained(exc, value, self.name))
            return
        if small is None:
            self._finish(kind, content)
        elif self.session.calls.pop(self.number, None) is not None:
            self.leave_queue = None
            if self.on_end is not None:
                self.on_end(None)
            self.session.send_small_result(self.number, kind, content)

    def fail(self, exc: BaseException) -> None:
        if self.number in self.session.calls:
            failure = RemoteFailure.of(exc, self.worker)
            if self.why_lost is not None and isinstance(exc, asyncio.CancelledError):
                # The caller was frozen, say: it has not cancelled the call, but lost it.
                reason = (
                    f"it had lost worker {self.caller!r} ({self.why_lost}), and ended its calls"
                )
                lost = WorkerLost(self.worker, reason, method=self.name, may_have_run=True)
                failure = RemoteFailure.refusal(lost, self.worker)
            self._finish(FAILED, failure, exc)

    def _encode(self, value: Any) -> tuple[Any, Any]:
        if self.is_cancelled:  # nobody would collect a large result
            raise asyncio.CancelledError
        found = value.cell() if type(value) is SharedValue else direct_cell(value)
        kind, content = found or (PACKED, pack(value))
        if kind is PLAIN or type(kind) is tuple:  # the common case
            return kind, content
        if self.recording is not None and kind == PACKED:
            content.warn_of_lost_graph(f"the result of {self.name}")
        if tensors := cell_tensors(kind, content):
            mapped = self.session.mapped
            check_sendable(tensors, mapped, self.caller)  # else its whole message would fail
            if kind == PACKED and self.recording is None:  # else torch sends the graph
                content = stage(content, mapped)
        return kind, content

    def _finish(self, kind: Any, content: Any, failure: BaseException | None = None) -> None:
        if self.session.calls.pop(self.number, None) is not None:
            self.leave_queue = None
            if self.on_end is not None:
                self.on_end(failure)
            self.session.send_result((self.number, kind, content), self.reply)


def _explained(exc: BaseException, result: Any, name: str) -> BaseException:
    """Return the error of a result that cannot be pickled, or of an `await` of what is iterated."""
    with contextlib.suppress(BaseException):  # of the `__class__` of a user's object
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            return TypeError(f"{name} is {GENERATOR_HINT}")
        if hint := await_hint(result):
            return TypeError(f"{name} returned a {type(result).__qualname__}{hint} there")
        if hasattr(type(result), "__aenter__"):
            return TypeError(f"{name} is a context manager; use `async with`, not `await`")
    try_add_note(exc, f"(while pickling the result of {name})")
    return exc


class CreateCall(RpcCall):
    """A call whose result stays on this worker. The caller gets an RRef to it."""

    sends_value = False

    def _encode(self, value: Any) -> tuple[Any, Any]:
        created = value.value if type(value) is SharedValue else value
        self.session.on_created(created)
        return super()._encode(make_rref(created))


def batch_joiner(function: Callable[..., Any], *, stream: bool = False) -> Joiner | None:
    """Return how a call joins the batches of `function`, None if it is not batched.

    A stream joins those of generators only.
    """
    inner: Any = getattr(function, "__func__", function)  # of a bound method
    if not hasattr(type(inner), "__aiorpc_join__") or (stream and not inner.__aiorpc_streams__):
        return None
    return functools.partial(inner.__aiorpc_join__, getattr(function, "__self__", None))
