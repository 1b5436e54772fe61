"""The calls of one connection that wait for a reply: futures and stream readers, by number.

Each is resolved once, by the first result or error. Confined to the loop of its connection.
"""

import asyncio
import contextvars
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._context.interception import End
from .._wire.columns import STREAM_END, HeldResult, read_column, read_kind
from .._wire.exceptions import RemoteFailure
from .._wire.messages import ResultKey, read_reply
from .._wire.pickling import CallAborted, LongPickle
from .._wire.targets import Target
from .._wire.tensors import from_bytes
from ..errors import RemoteError, RpcError
from .answers import exception_of
from .stream_reader import Item, StreamReader

if TYPE_CHECKING:
    from .connection import Connection

Step = Callable[["InlineFuture"], object]


class InlineFuture:
    """A result that one task awaits, for use on its event loop only.

    An `asyncio.Future` resumes its task with `call_soon`, an iteration later: 15 µs of a lone call.
    Here the code that has the result runs the task's next step itself.

    `asyncio.Task` accepts what has these methods and `_asyncio_future_blocking`, a private
    interface of CPython 3.11 to 3.14. (With the C and the Python task:
    tests/unit/client/test_inline_future.py)
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_context",
        "_loop",
        "_state",
        "_step",
        "answer",  # the result, once it is set
        "connection",  # over which the call is sent
        "encoded",  # the target as it is sent
        "event",  # of a profiler that records the call, until its result; else not set
        "number",  # of the call there
        "started",  # `time.monotonic()` of the call
        "target",  # of the call
    )

    answer: Any
    connection: Any
    encoded: Any
    event: Any
    number: int
    started: float
    target: Any

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._state = "waiting"
        self._step: Step | None = None
        self._asyncio_future_blocking = True  # a task that is given it may wait

    def __repr__(self) -> str:
        return f"<InlineFuture {self._state}>"

    def set_result(self, result: Any) -> bool:
        """Set the result; return whether a task waits for it and is to be resumed."""
        if self._state != "waiting":
            return False
        self._state = "done"
        self.answer = result
        self.event = None  # before the caller goes on, and perhaps stops the profiler
        return self._step is not None

    def resume(self) -> None:
        """Run the next step of the waiting task. Call it outside any task."""
        step, self._step = self._step, None
        if step is not None:
            self._context.run(step, self)

    def __await__(self) -> Generator[Any, None, Any]:
        if self._state == "waiting":
            self._asyncio_future_blocking = True
            yield self
        return self.result() if self._state == "cancelled" else self.answer

    # ── called by asyncio.Task ──────────────────────────────────────────────────────────────────

    def add_done_callback(self, step: Step, *, context: contextvars.Context) -> None:
        """Keep the next step of the task for `resume`; a future that is done resumes it soon."""
        self._step = step
        self._context = context
        if self._state != "waiting":  # `resume` was called already, and has found no step
            self._loop.call_soon(self.resume)

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the wait; the task resumes in the next iteration of the loop."""
        if self._state != "waiting":
            return False
        self._state = "cancelled"
        self.answer = msg
        self.event = None
        self._loop.call_soon(self.resume)
        return True

    def result(self) -> Any:
        """Return the result, or raise CancelledError."""
        if self._state == "cancelled":
            # anyio's scopes recognize their own cancellations by the message.
            raise asyncio.CancelledError(*([] if self.answer is None else [self.answer]))
        return self.answer


def resume_all(futures: Iterable[InlineFuture], loop: asyncio.AbstractEventLoop) -> None:
    """Resume the tasks of all futures, also if one raises (SystemExit, say)."""
    rest = iter(futures)
    try:
        for future in rest:
            future.resume()
    finally:
        for future in rest:
            loop.call_soon(future.resume)


ReplyReceiver = InlineFuture | StreamReader
"""A receiver of the reply to one call.

It has the connection and the number of the call. Both change if another connection takes it over.
"""

_NOT_A_STREAM = CallAborted(RemoteError("a value came in place of the items of a stream"))


def cancel(call: ReplyReceiver) -> None:
    """Cancel a call: its caller does not wait any more."""
    call.connection.cancel(call.number)


def foresee(call: ReplyReceiver, seconds: float) -> None:
    """Ask where a call stands that `expire` will end soon, for the text of its error."""
    call.connection.foresee(call.number, seconds)


def expire(call: ReplyReceiver, seconds: float) -> None:
    """End a call with CallTimeout, `seconds` after it was made."""
    call.connection.expire(call, seconds)


class PendingCalls(dict[int, ReplyReceiver]):
    """The pending calls of one connection.

    Attributes:
        late: number of replies to calls that were given up.
        wake: resolved futures, whose tasks the reader of the results has to resume.
    """

    def __init__(self, connection: "Connection") -> None:
        super().__init__()
        self.late = 0
        self.wake: list[InlineFuture] = []
        self._connection = connection
        self._window = connection.window
        self._loading: dict[int, InlineFuture] = {}  # whose results have come
        self._observed: dict[int, tuple[Target, End]] = {}  # of interceptors

    def on_results(self, data: bytes, tensors: Sequence[Tensor] = ()) -> int:
        """Deliver the results in a frame; return their number.

        `tensors` are those that came outside the bytes.
        """
        rest, count = iter(tensors), 0
        for kind, keys, cells in read_reply(data):
            if type(cells) is bytes:  # small tensors, the common case
                values = from_bytes(read_kind(kind), cells, len(keys))
            else:
                values = read_column(kind, cells, rest, len(keys))
            self.deliver(zip(keys, values))  # noqa: B905 - 0.2 µs
            count += len(keys)
        return count

    def deliver(self, outcomes: Iterable[tuple[ResultKey, Any]]) -> None:
        """Deliver results and items, given with their keys."""
        window = self._window
        for key, value in outcomes:
            if type(key) is not int:
                if self._add_item(key, value):
                    window.answered((key[0],))  # type: ignore[index]
                continue
            if type(value) is HeldResult and key in self:
                self._connection.transfers.collect(key, self[key], None)
                continue
            if (size := window.pop(key, None)) is not None:  # as `answered`
                window.size -= size
                window.answers += 1
            receiver = self.pop(key, None)
            if type(value) is LongPickle and type(receiver) is InlineFuture:
                self._load(key, receiver, value)
                continue
            if self._observed:
                self._end(key, value)
            if type(receiver) is InlineFuture:
                if receiver._state == "waiting":  # as `set_result`
                    receiver._state = "done"
                    receiver.answer, receiver.event = value, None
                    if receiver._step is not None:
                        self.wake.append(receiver)
            elif receiver is None:
                self.late += 1
                if type(value) is HeldResult:
                    self._connection.release_held(key)
            elif isinstance(receiver, StreamReader):  # the callee could not begin the stream
                receiver.fail(value if type(value) is RemoteFailure else _NOT_A_STREAM)

    def _load(self, number: int, receiver: InlineFuture, value: LongPickle) -> None:
        """Load the result of a call, which has ended, in a thread."""
        self._loading[number] = receiver
        finish = functools.partial(self.finish_loading, number)
        value.load_in_thread(receiver._loop, finish)

    def finish_loading(self, number: int, answer: Any) -> None:
        """End a call whose result has come and is loaded, unless it has ended."""
        if (receiver := self._loading.pop(number, None)) is not None:
            if self._observed:
                self._end(number, answer)
            if receiver.set_result(answer):
                # The end of a block of `timeout` may call this, before it has seen to itself.
                receiver._loop.call_soon(receiver.resume)

    def _add_item(self, key: Any, value: Any) -> bool:
        """Deliver an item of a stream; return whether the stream has ended."""
        number, index, cost = key
        if not (type(number) is type(index) is type(cost) is int):
            raise TypeError(f"the key of a stream's item must be three ints, got {key!r}")
        receiver = self.get(number)
        if type(receiver) is not StreamReader:
            if receiver is not None:
                raise TypeError(f"an item of a stream came for call {number}, which is no stream")
            if type(value) is HeldResult:
                self._connection.release_held(number)
            return cost == 0  # only the end is free
        if cost == 0 and not (value is STREAM_END or type(value) in (RemoteFailure, HeldResult)):
            raise TypeError(f"an item of the stream of call {number} must have a cost, got 0")
        if type(value) is LongPickle:
            if (item := receiver.add(HeldResult(0), cost)) is not None:
                self.fill(receiver, item, value)
        elif (item := receiver.add(value, cost)) is not None:
            self._connection.transfers.collect(key, receiver, item)
        if cost == 0:
            del self[number]
            if self._observed:
                self._end(number, value)
            receiver.add(STREAM_END, 0)  # also after a held end: a failure too large for a frame
        return cost == 0

    def fill(self, receiver: StreamReader, item: Item, value: Any) -> None:
        """Set the value of an item that was held, once it is loaded."""
        if type(value) is LongPickle:
            fill = functools.partial(receiver.fill, item)
            value.load_in_thread(asyncio.get_running_loop(), fill)
        else:
            receiver.fill(item, value)

    def fail(self, numbers: Iterable[int], error: RpcError, *, were_sent: bool = True) -> None:
        """End calls with an error: no reply will come."""
        aborted = CallAborted(error, was_sent=were_sent)
        for number in numbers:
            receiver = self.pop(number, None)
            if self._observed:
                self._end(number, aborted)
            if isinstance(receiver, StreamReader):
                receiver.fail(aborted)
            elif receiver is not None and receiver.set_result(aborted):
                # A task may call this, and no task's step can run inside another's.
                receiver._loop.call_soon(receiver.resume)

    def take_over(self, number: int, earlier: "PendingCalls", its_number: int) -> None:
        """Let a call of another connection wait for its reply here."""
        self[number] = earlier.pop(its_number)
        if (observed := earlier._observed.pop(its_number, None)) is not None:
            self._observed[number] = observed

    # ── given up, and observed ──────────────────────────────────────────────────────────────────

    def drop(self, number: int) -> bool:
        """Forget a call whose caller does not wait any more; return whether it was pending."""
        if (receiver := self.pop(number, None)) is None:
            if self._loading.pop(number, None) is not None and self._observed:
                self._end(number, asyncio.CancelledError())
            return False
        if self._observed:  # to leave a stream early is no failure
            is_stream = type(receiver) is StreamReader
            self._end(number, None if is_stream else asyncio.CancelledError())
        return True

    def observe(self, number: int, target: Target, end: End) -> None:
        """Call `end` when a call of `target` has ended."""
        self._observed[number] = target, end

    def _end(self, number: int, answer: Any) -> None:
        target, end = self._observed.pop(number, (None, None))
        if end is not None and target is not None:
            is_given_up = isinstance(answer, asyncio.CancelledError)
            end(answer if is_given_up else exception_of(answer, target))
