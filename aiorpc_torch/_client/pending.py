"""The calls of one connection that wait for a reply: futures and stream readers, by number.

Each is resolved once, by the first result or error. Confined to the loop of its connection.
"""

import asyncio
import functools
from collections.abc import Callable, Iterable
from typing import Any

from .._aio.tasks import InlineFuture
from .._context.interception import End
from .._wire.columns import STREAM_END, HeldResult
from .._wire.connection_state import FlowWindow
from .._wire.exceptions import RemoteFailure
from .._wire.messages import ResultKey
from .._wire.pickling import CallAborted, LongPickle
from .._wire.targets import Target
from ..errors import RemoteError, RpcError
from .answers import exception_of
from .stream_reader import Item, StreamReader

ReplyReceiver = InlineFuture | StreamReader
"""A receiver of the reply to one call.

It has the connection and the number of the call. Both change if another connection takes it over.
"""

_NOT_A_STREAM = CallAborted(RemoteError("a value came in place of the items of a stream"))

Collect = Callable[[ResultKey, ReplyReceiver, Item | None], None]
"""Asks for a result that the callee holds: a call's, or an item's."""

Release = Callable[[int], None]
"""Tells the callee that no result which it holds of a call will be collected."""


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

    Args:
        window: the calls that were sent; those that end leave it.
        release: is called for the call of a held result that is not wanted any more.

    Attributes:
        collect: is called for each wanted result that the callee holds.
        late: number of replies to calls that were given up.
        wake: resolved futures, whose tasks the reader of the results has to resume.
    """

    collect: Collect

    def __init__(self, window: FlowWindow, release: Release) -> None:
        super().__init__()
        self.late = 0
        self.wake: list[InlineFuture] = []
        self._window = window
        self._release = release
        self._loading: dict[int, InlineFuture] = {}  # whose results have come
        self._observed: dict[int, tuple[Target, End]] = {}  # of interceptors

    def deliver(self, outcomes: Iterable[tuple[ResultKey, Any]]) -> None:
        """Deliver results and items, given with their keys."""
        ended = []
        for key, value in outcomes:
            if type(key) is int:
                if type(value) is HeldResult and key in self:
                    self.collect(key, self[key], None)
                    continue
                ended.append(key)
                receiver = self.pop(key, None)
                if type(value) is LongPickle and type(receiver) is InlineFuture:
                    self._load(key, receiver, value)
                    continue
                if self._observed:
                    self._end(key, value)
                if type(receiver) is InlineFuture:
                    if receiver.set_result(value):
                        self.wake.append(receiver)
                elif receiver is None:
                    self.late += 1
                    if type(value) is HeldResult:
                        self._release(key)
                elif isinstance(receiver, StreamReader):  # the callee could not begin the stream
                    receiver.fail(value if type(value) is RemoteFailure else _NOT_A_STREAM)
            elif self._add_item(key, value):
                ended.append(key[0])  # type: ignore[index]
        self._window.answered(ended)

    def _load(self, number: int, receiver: InlineFuture, value: LongPickle) -> None:
        """Load the result of a call, which has ended, in a thread."""
        self._loading[number] = receiver
        finish = functools.partial(self.finish_loading, number)
        value.load_in_thread(receiver.get_loop(), finish)

    def finish_loading(self, number: int, answer: Any) -> None:
        """End a call whose result has come and is loaded, unless it has ended."""
        if (receiver := self._loading.pop(number, None)) is not None:
            if self._observed:
                self._end(number, answer)
            if receiver.set_result(answer):
                # The end of a block of `timeout` may call this, before it has seen to itself.
                receiver.get_loop().call_soon(receiver.resume)

    def _add_item(self, key: Any, value: Any) -> bool:
        """Deliver an item of a stream; return whether the stream has ended."""
        number, index, price = key
        if not (type(number) is type(index) is type(price) is int):
            raise TypeError(f"the key of a stream's item must be three ints, got {key!r}")
        receiver = self.get(number)
        if type(receiver) is not StreamReader:
            if receiver is not None:
                raise TypeError(f"an item of a stream came for call {number}, which is no stream")
            if type(value) is HeldResult:
                self._release(number)
            return price == 0  # only the end is free
        if price == 0 and not (value is STREAM_END or type(value) in (RemoteFailure, HeldResult)):
            raise TypeError(f"an item of the stream of call {number} must have a price, got 0")
        if type(value) is LongPickle:
            if (item := receiver.add(HeldResult(0), price)) is not None:
                self.fill(receiver, item, value)
        elif (item := receiver.add(value, price)) is not None:
            self.collect(key, receiver, item)
        if price == 0:
            del self[number]
            if self._observed:
                self._end(number, value)
            receiver.add(STREAM_END, 0)  # also after a held end: a failure too large for a frame
        return price == 0

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
                receiver.get_loop().call_soon(receiver.resume)

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
