"""The calls of one event loop to one peer, sent together.

What one turn of the loop calls leaves as one message at its end; a call that finds the link idle
leaves at once. The answer to a message carries back what is done by then. While anything is awaited
a message is outstanding: if no other is, one without calls. Its failure tells of a lost peer.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence, Sized
from typing import Any

import torch
from torch._C._distributed_rpc import WorkerInfo

from . import _devices, _doors
from ._backlog import LARGE, Backlog
from ._bridge import in_autograd_context, send, transport_error, when_done
from ._errands import sent_by
from ._handles import Handles
from ._incoming import Incoming
from ._message import Calls, Outgoing, Work, dump, lay_out, outgoing, shorten
from ._pending import Heard, Pending, Sink, Unreadable, tell
from ._recording import Recorded, current
from ._tensors import Table, size_of
from ._wait import Wait, wake_all
from ._window import TRICKLE, Window
from ._wire import Target, describe
from .errors import CallTimeout, NotServing, RpcError, WorkerLost

Rest = tuple[int, list[int], list[tuple[int, int]]] | None  # number, cancels, credits of a message

NO_CALLS = Calls()


class Link:
    """One-way: calls go out, outcomes come back. Confined to the loop that it was made on."""

    def __init__(
        self,
        caller: str,
        number: int,
        peer: WorkerInfo,
        heard: Callable[[str], None],
        broken: Callable[[WorkerInfo, RpcError], None],
        mapped: Collection[torch.device] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._caller, self._number = caller, number
        self._peer = peer
        self._heard, self._broken, self._mapped = heard, broken, mapped
        self._seq = self._calls = self._bytes = 0
        self._pending = Pending()
        self._cancels: list[int] = []
        self._credits: list[tuple[int, int]] = []
        self._flushing = self._polling = False
        self._woken = 0  # by the last answer: they may call again together
        self._rest: Sized = getattr(self._loop, "_ready", ())  # what the loop has yet to do
        self._trickling: asyncio.TimerHandle | None = None
        self._outstanding = 0  # messages whose answers may carry any result
        self._window = Window()
        self._queue = Backlog(self._pending, self._window)
        self._handles = Handles()
        self._recorded: set[Recorded] = set()  # those of autograd contexts that are not answered

    def __repr__(self) -> str:
        return (
            f"<Link to {self._peer.name}: {len(self._pending)} waiting, {len(self._queue)} unsent, "
            f"{self._outstanding} messages outstanding>"
        )

    @property
    def waiting(self) -> int:
        """How many calls and streams wait for an answer."""
        return len(self._pending)

    def tally(self) -> dict[str, int]:
        """What it has done and is doing; the names are those of `Stats`."""
        return {
            "calls": self._calls,
            "in_flight": len(self._pending),
            "unsent": len(self._queue),
            "messages": self._seq,
            "bytes_sent": self._bytes,
            "late": self._pending.late,
        }

    # ── what a call asks for ────────────────────────────────────────────────────────────────────

    def call(self, target: Target, work: Work, due: float | None) -> tuple[int, Wait]:
        """Send a call; its number, and what is to be awaited: its value, `Failure` or `Broken`."""
        call, wait = self._outgoing(target, False, work, due), Wait(self._loop)
        self._enqueue(call, wait, target)
        return call.number, wait

    def stream(self, target: Target, work: Work, due: float | None) -> tuple[int, Incoming]:
        """Send a call whose items are awaited one by one; its number, and where they arrive."""
        call = self._outgoing(target, True, work, due)
        number = call.number  # and not the call, which has the arguments
        incoming = Incoming(lambda credit: self._grant(number, credit))
        self._enqueue(call, incoming, target)
        return number, incoming

    def cancel(self, number: int) -> None:
        """Nobody waits for that call any more."""
        if self._pending.pop(number, None) is not None:
            self._cancel_there(number)

    def expire(self, number: int, seconds: float) -> None:
        """The time of that call is over."""
        if number in self._pending:
            late = CallTimeout(f"no answer from worker {self._peer.name!r} within {seconds:.3g} s")
            self._pending.fail((number,), late)
            self._cancel_there(number)

    def _cancel_there(self, number: int) -> None:
        if number in self._window:  # else it has not left, and will not
            self._cancels.append(number)
            self._flush_soon()

    def _outgoing(self, target: Target, stream: bool, work: Work, due: float | None) -> Outgoing:
        short = shorten(target, None if target.on is None else self._handles.name(target.on))
        call = outgoing(self._calls, short, stream, work, due, sent_by(self._caller))
        if call.header[2] is None:  # packed as a whole
            _devices.check(call.cells[0].devices(), self._mapped, self._peer.name)
        return call

    def _grant(self, number: int, credit: int) -> None:
        self._credits.append((number, credit))
        self._flush_soon()

    def _enqueue(self, call: Outgoing, sink: Sink, target: Target) -> None:
        self._calls += 1
        is_first = not self._pending
        self._pending[call.number] = sink
        if (recording := current()) is not None:  # in a context of autograd
            recorded = recording.begin(describe(target), self._peer.name, self._recorded)
            if recorded is not None:
                self._flush()  # it is recorded as it is sent: so now, and by itself
                self._window.sent(call.number, call.size)
                self._send((call,), recorded=recorded)
                return
        self._queue.append(call)
        is_alone = is_first and self._woken <= 1 and not self._rest
        if is_alone or call.size > LARGE or self._queue.is_enough(self._outstanding, self._woken):
            self._flush()
        else:
            self._flush_soon()

    # ── what leaves ─────────────────────────────────────────────────────────────────────────────

    async def goodbye(self, failure: str) -> None:
        """Tell the peer that this process leaves, and what ends it, if so; return when it knows."""
        self._flush()
        heard: asyncio.Future[None] = self._loop.create_future()
        self._send((), goodbye=failure, heard=heard)
        await heard

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        while (calls := self._queue.slice()) or self._cancels or self._credits:
            self._send(calls)
        if self._queue and self._trickling is None:
            answers = self._window.answers
            self._trickling = self._loop.call_later(TRICKLE, self._trickle, answers)

    def _trickle(self, answers: int) -> None:
        self._trickling = None
        if answers == self._window.answers and (calls := self._queue.force()):
            self._send(calls)
        self._flush()

    def _send(
        self,
        calls: Sequence[Outgoing],
        *,
        recorded: Recorded | None = None,
        goodbye: str | None = None,
        heard: Heard = None,
        instead_of: int | None = None,
    ) -> None:
        tensors = Table()
        parts = lay_out(calls, time.monotonic(), tensors) if calls else NO_CALLS
        cancels, grants = self._cancels, self._credits
        if cancels or grants:
            self._cancels, self._credits = [], []
        seq = self._seq if instead_of is None else instead_of
        context = -1 if recorded is None else recorded.context
        head = self._caller, self._number, seq, context
        data = dump((*head, *parts, cancels, grants, goodbye))
        numbers = parts.numbers
        try:
            if recorded is None:
                answer = send(self._peer, _doors.answer, data, tensors)
            else:
                with in_autograd_context(context):
                    answer = send(self._peer, _doors.answer, data, recorded.leave(tensors))
        except Exception as exc:  # nothing was sent, so the message's number is still free
            if calls:  # what was to go with them goes without them
                self._cancels, self._credits = cancels, grants
                self._flush_soon()
            if len(calls) > 1:  # one of them cannot be sent
                for call in calls:
                    self._send((call,))
            else:
                error = transport_error(exc, self._peer.name)
                self._failed(numbers, error, heard, recorded)
            return
        self._seq += instead_of is None
        self._outstanding += recorded is None
        self._bytes += len(data) + sum(map(size_of, tensors))
        rest = None if instead_of is not None else (seq, cancels, grants)
        first = None if recorded is None else recorded.done
        when_done(answer, lambda done: self._answered(numbers, done, heard, recorded, rest), first)

    # ── what comes back ─────────────────────────────────────────────────────────────────────────

    def _answered(
        self,
        numbers: Sequence[int],
        answer: Any,
        heard: Heard,
        recorded: Recorded | None,
        rest: Rest,
    ) -> None:
        self._outstanding -= recorded is None
        wake: list[Wait] = []
        try:
            ended, learned = self._pending.take(answer, self._peer.name, wake, recorded is not None)
        except RpcError as error:
            if not isinstance(error, WorkerLost | NotServing | Unreadable):
                error = Unreadable(str(error)) if rest is None else self._replace(error, *rest)
            self._failed(numbers, error, heard, recorded)
        else:
            self._heard(self._peer.name)
            self._window.answered(ended)
            self._handles.learned(learned)
            tell(heard, None)
        self._woken = len(wake)
        if self._queue:
            self._flush()
        if len(self._window) and not self._outstanding and not self._polling:
            self._polling = True  # in the next turn: those who were answered may call again
            self._loop.call_soon(self._poll)
        wake_all(wake, self._loop)

    def _poll(self) -> None:
        self._polling = False
        if len(self._window) and not self._outstanding:
            self._send(())

    def _replace(
        self, error: RpcError, seq: int, cancels: list[int], grants: list[tuple[int, int]]
    ) -> RpcError:
        """A message was not taken in, and those after it wait for its number: send it empty."""
        self._cancels[:0] = cancels
        self._credits[:0] = grants
        self._send((), instead_of=seq)  # if it was taken in after all, this is dropped there
        return error

    # ── when nothing will come back ─────────────────────────────────────────────────────────────

    def close(self) -> None:
        """This process leaves: whoever still waits learns it."""
        if self._trickling is not None:
            self._trickling.cancel()
        self.lost(NotServing(f"this worker left its world before {self._peer.name!r} answered"))

    def lost(self, error: RpcError) -> None:
        """The peer gives no sign of life. Should it come back, what it ran for us is cancelled."""
        self._queue.clear()
        self._pending.fail([*self._pending], error)
        self._cancels += self._window.clear()
        for recorded in [*self._recorded]:
            recorded.failed(error)

    def _failed(
        self, numbers: Sequence[int], error: RpcError, heard: Heard, recorded: Recorded | None
    ) -> None:
        if recorded is not None:
            recorded.failed(error)
        # A lost peer answers nothing any more; otherwise the other messages go their way.
        if isinstance(error, WorkerLost | NotServing):
            numbers = [*self._pending]
            self._queue.clear()
            self._window.clear()
        elif isinstance(error, Unreadable):  # it may have brought the results of any that were sent
            numbers = self._window.clear()
            self._cancels += numbers
            self._flush_soon()
        self._window.answered(numbers)
        self._pending.fail(numbers, error)
        if isinstance(error, WorkerLost):
            self._broken(self._peer, error)
        tell(heard, error)
