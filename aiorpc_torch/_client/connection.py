"""A connection: the calls of one event loop to one peer.

`SendState` decides when calls are sent; `PendingCalls` holds the receivers of their replies.
Large tensors go in shared memory, on sockets of their own or by torch RPC.

A connection is one-way: two workers that connect to each other at once make two of them, and no
rule has to choose one.
"""

import asyncio
import contextlib
import contextvars
import logging
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from sys import modules
from typing import Any

from torch import Tensor

from .._aio.deadlines import in_seconds, notice_of
from .._channel import Channel, channel_repr
from .._context import propagation
from .._context.interception import TRACER, CallInfo, Kind, begin_call, is_needed
from .._context.recording import RecordedCall, current_record, record_for_call
from .._peers.observer import PeerObserver
from .._peers.peers import Peer
from .._torch.compat import WorkerInfo, current_context_id
from .._torch.devices import NO_DEVICES, DeviceMapping
from .._torch.profiling import call_event, profiler_enabled
from .._torch.switches import warn_of_autocast
from .._wire.ancestry import awaited, entered_scopes
from .._wire.columns import STREAM_END, plain_bytes, plain_cell
from .._wire.connection_state import FlowWindow, Phase
from .._wire.frames import (
    CALLS,
    RESULTS,
    RETIRE,
    WHERE,
    CloseReason,
    header,
)
from .._wire.handshake import ARGUMENTS, Party, number_for
from .._wire.messages import Arguments, EncodedCall
from .._wire.pickling import CallAborted
from .._wire.plain import dump
from .._wire.shared_arguments import MemberArguments
from .._wire.targets import MethodTarget, Target, call_name, target_name
from .._wire.tensors import INLINE_BYTES, small_tensor
from .._wire.wire_targets import EncodedTarget
from ..errors import (
    CallTimeout,
    RemoteError,
    RpcError,
    WorkerLeft,
    WorkerLost,
    WorkerUnreachable,
)
from .answers import error_of_close
from .call_encoder import PICKLED, CallEncoder
from .introduction import Holding, Introductions, held_too_long
from .pending import InlineFuture, PendingCalls, ReplyReceiver, resume_all
from .questions import Questions
from .sender import CallSender
from .stream_reader import StreamReader
from .torch_transfers import TorchTransfers

log = logging.getLogger("aiorpc_torch")

KNOCK_DELAY = 0.1  # seconds for a ping's answer, before the peer is asked at a new socket


class Connection(Channel):
    """A connection to one peer, one-way: calls go out, results come in. Confined to its loop.

    Args:
        me: this process.
        peer: the process that runs the calls.
        connection_number: number of this connection among those of this process.
        observer: is told of the peer's messages and of the connection's end.
        introductions: open the connections of this process.
        succeed: returns the connection that takes the calls to a worker now.
        devices: those that tensors for the peer may be on, beside the CPU, and the peer's for each.

    Attributes:
        number: number of this connection among those of this process.
        key: that of its session at the peer.
        phase: its phase, which only `_enter` changes.
        encoder: encodes the calls.
        pending: the calls that wait for a reply.
        window: those that were sent.
        transfers: carry what else does not go in frames, by torch RPC.
        questions: ask the peer where calls stand.
        state: the unsent calls.
    """

    def __init__(
        self,
        me: Party,
        peer: Peer,
        connection_number: int,
        observer: PeerObserver,
        introductions: Introductions,
        succeed: "Callable[[str], Connection]",
        devices: DeviceMapping = NO_DEVICES,
    ) -> None:
        super().__init__(peer, observer, self._on_carrier, self._dial)
        self.phase = Phase.OPENING
        self.peer: WorkerInfo = peer.member.info
        self.number = connection_number
        self.key = (me.name, me.worker_id, connection_number)
        self.encoder = CallEncoder(me.name, peer.name, devices)
        self.window = FlowWindow()
        self.pending = PendingCalls(self)
        self.transfers = TorchTransfers(self)
        self.questions = Questions(self)
        self._sender = CallSender(self)
        self.state = self._sender.state
        self.flush = self._sender.flush
        self.handlers |= {
            RESULTS: self.pending.on_results,
            RETIRE: self._retire,
            WHERE: self.questions.on_answer,
            **self.carriers.handlers(self.pending.on_results),
        }
        self._me = me
        self._peer_name = peer.name  # torch makes a new str each time
        self._recorded_calls: set[RecordedCall] = set()  # unanswered, of autograd contexts
        # Counters.
        self._calls = 0
        self._lone_calls = self._lone_bytes = 0  # that `call` itself has sent
        self._passed_on = 0  # calls that another connection has taken over
        # Its opening.
        self._introductions = introductions
        self._opening: asyncio.Task[None] | None = None
        self._opening_limits: list[asyncio.TimerHandle] = []  # end the calls that are held too long
        # The end of its path.
        self._succeed = succeed
        self._is_successor = False  # its first calls were not sent over another connection
        self._judging: asyncio.Task[None] | None = None  # or the loop would lose it
        self._knocking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return channel_repr(
            self, f"to {self.peer.name}", f"{len(self.pending)} waiting", self.state
        )

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, and its calls have."""
        return self.ended.is_set() and self.phase is Phase.FINISHED

    @property
    def waiting(self) -> int:
        """The number of calls and streams that wait for a reply."""
        return len(self.pending)

    def oldest(self, most: int | None) -> list[tuple[int, ReplyReceiver]]:
        """Return the numbers and receivers of the oldest pending calls. In any thread."""
        return [*islice(self.pending.items(), most)]

    def has_work(self) -> bool:
        """Return whether a call is pending or unsent, or the peer still needs its tensors."""
        state = self.state
        return bool(self.pending or self.window or len(state) or self.carriers.has_work())

    def counters(self) -> dict[str, int]:
        """Return the counters of this connection, by the names of `Stats`."""
        return {
            "calls": self._calls - self._passed_on,
            "in_flight": len(self.pending),
            "unsent": len(self.state),
            "messages": self._sender.messages + self._lone_calls,
            "bytes_sent": self._sender.bytes + self._lone_bytes,
            "late": self.pending.late,
            "shared_messages": self.carriers.shared.sent,
            "socket_messages": self.carriers.sockets.sent,
        }

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def call(self, target: Target, args: Arguments, due: float | None) -> InlineFuture:
        """Send a call; return the future of its value, or of its failure.

        Most calls have one small argument, and are sent or queued here. The questions of
        `encoder.call` and `_submit` are asked in place, which saves their functions.
        `_call_any` has every other call.
        """
        (values, keywords), receiver = args, InlineFuture(self.loop)
        # Is it open, and was its target encoded for an earlier call? Are there ancestors to send?
        is_simple = due is None and not keywords and len(values) == 1
        if not (is_simple and self.is_open and type(target) is MethodTarget):
            return self._call_any(receiver, target, args, due)
        known = self.encoder.methods.get(target.name)
        if known is None or known.rref() is not target.on or entered_scopes() or awaited:
            return self._call_any(receiver, target, args, due)
        # Is it of an autograd context? Do variables travel with it, or is it told of?
        if current_record() is not None or current_context_id() >= 0:
            return self._call_any(receiver, target, args, due)
        if (propagation.used or TRACER in modules) and is_needed():
            return self._call_any(receiver, target, args, due)
        # Is it small, and its result too, as far as is known?
        value, encoded, large = values[0], known.target, self.transfers.large_results
        found = small_tensor(value) if type(value) is Tensor else plain_cell(value)
        if found is None or (large and encoded in large):
            return self._call_any(receiver, target, args, due)
        (kind, cell), number, state, window = found, self._calls, self.state, self.window
        head = known.heads.get(kind) or self.encoder.head_of_one(known, kind)
        # Is another call unanswered or unsent, as `may_send_alone`? Has the transport failed? It
        # would drop the call, which in the queue is known to be unsent.
        others = state.is_paused or window or state.queue or state.cancels or state.credits
        if others or state.woken != 1 or self.transport.is_closing():
            size = len(cell) if type(cell) is bytes else plain_bytes(cell)
            call = EncodedCall(number, head, (cell,), None, size)
            if call.is_large:
                return self._call_any(receiver, target, args, due)
            self._queue(call, receiver, target)
            return receiver
        column = cell if type(kind) is tuple else (cell,)
        data = dump(((head.data, (number,), (column,)),))
        size = len(data)
        if size > INLINE_BYTES:
            return self._call_any(receiver, target, args, due)
        self._calls = number + 1  # as `_register`
        receiver.connection, receiver.number = self, number
        receiver.target, receiver.encoded, receiver.started = target, encoded, time.monotonic()
        self.pending[number] = receiver
        if profiler_enabled():
            self._record(receiver, target)
        window[number] = size  # as `sent`
        window.size += size
        self._lone_calls += 1
        self._lone_bytes += size
        self.write(header(size, CALLS) + data)  # as `frame`, of small data
        return receiver

    def _call_any(
        self, receiver: InlineFuture, target: Target, args: Arguments, due: float | None
    ) -> InlineFuture:
        """Encode any call, and send it; return its receiver."""
        call = self.encoder.call(self._calls, target, False, args, due)
        self._submit(call, receiver, target)
        return receiver

    def _submit(self, call: EncodedCall, receiver: ReplyReceiver, target: Target) -> None:
        """Send an encoded call at once if no other is under way, else queue it.

        Before that it gets what does not depend on its arguments: context variables, a record in
        its autograd context, the way by torch RPC, a time limit while the connection opens.
        """
        if (propagation.used or TRACER in modules) and is_needed():
            self._carry(call, target, is_stream=type(receiver) is StreamReader)
        is_recorded = current_record() is not None or current_context_id() >= 0
        recording = record_for_call() if is_recorded else None
        if call.is_large or recording is not None:  # beside these the check costs nothing
            warn_of_autocast()
        if recording is not None:  # in an autograd context
            name = target_name(target)
            if call.head.kinds == PICKLED:
                call.cells[0].warn_of_lost_graph(f"an argument of {name}")
            call.recorded = recording.begin(name, self.peer.name, self._recorded_calls)
        large_results = self.transfers.large_results
        if call.recorded is not None or (large_results and call.head.target in large_results):
            call.by_torch = call.is_large = True
        if self.phase is Phase.OPENING:
            self._limit_opening(call.number)
        is_lone = not call.is_large and self.state.may_send_alone()
        if is_lone and self.is_open and not self.transport.is_closing():
            self._register(call.number, receiver, target, call.head.target)
            self.window.sent(call.number, call.size)
            self._sender.send((call,))
        else:
            self._queue(call, receiver, target)

    def _carry(self, call: EncodedCall, target: Target, *, is_stream: bool) -> None:
        """Let the context variables travel with a call, and tell the interceptors of it."""
        kind: Kind = "stream" if is_stream else "call"
        info = CallInfo(kind, call_name(target), self._me.name, self._peer_name, time.monotonic())
        carried, end = begin_call(info)
        if carried:
            call.carry(carried)
        if end is not None:
            self.pending.observe(call.number, target, end)

    def _queue(self, call: EncodedCall, receiver: ReplyReceiver, target: Target) -> None:
        """Queue a call; send the queue now, or at the end of this loop iteration."""
        is_idle = not self.pending
        self._register(call.number, receiver, target, call.head.target)
        if self.state.submit(call, is_idle=is_idle):
            self.flush()
        else:
            self.flush_soon()

    def _register(
        self, number: int, receiver: ReplyReceiver, target: Target, encoded: EncodedTarget
    ) -> None:
        """Let a call wait for its reply."""
        self._calls = number + 1
        receiver.connection, receiver.number = self, number
        receiver.target, receiver.encoded, receiver.started = target, encoded, time.monotonic()
        self.pending[number] = receiver
        if profiler_enabled():
            self._record(receiver, target)

    def _record(self, receiver: ReplyReceiver, target: Target) -> None:
        """Let a profiler record a call until its result."""
        receiver.event = call_event("call", target_name(target), self._me.name, self._peer_name)

    def call_prepared(
        self, target: Target, encoded: EncodedTarget, args: MemberArguments, due: float | None
    ) -> InlineFuture:
        """Send a call of a group, whose target is encoded. Returns the same as `call`."""
        future = InlineFuture(self.loop)
        self._submit(self.encoder.member_call(self._calls, encoded, args, due), future, target)
        return future

    def stream(self, target: Target, args: Arguments, due: float | None) -> StreamReader:
        """Send a call of a generator; return the reader of its items."""
        call, reader = self.encoder.call(self._calls, target, True, args, due), StreamReader()
        self._submit(call, reader, target)
        return reader

    def cancel(self, number: int) -> None:
        """Cancel a call: its caller does not wait any more."""
        if self.pending.drop(number) and not self.loop.is_closed():
            self.state.cancel(number)
            self.carriers.drop_cancelled()
            self.flush_soon()

    def foresee(self, number: int, seconds: float) -> None:
        """Ask where a call stands that `expire` will end soon, for the text of its error."""
        if number in self.pending and (left := notice_of(seconds)):
            self.questions.foresee(number, left)

    def why_unsent(self, number: int) -> str | None:
        """Return why a pending call is not sent, None if it is."""
        if not self.is_open:
            # Of `attach`: each end learns the other's address by torch's RPC.
            why = "; torch's threads there may all wait" if self._holding() is not None else ""
            return f"is not sent: there is no connection yet{why}"
        if not self.state.was_sent(number):
            return "is not sent: it waits for flow control, or a copy of its tensors"
        return None

    def expire(self, call: ReplyReceiver, seconds: float) -> None:
        """End a call with CallTimeout: it has no result, or not all items, after `seconds`."""
        number = call.number
        holding = self._holding()
        if holding is not None and holding.is_held(self.peer.name):
            self._give_up(number, seconds)
        elif number in self.pending:
            was_sent = self.state.cancel(number)
            self.pending.fail((number,), self._timeout_of(call, seconds, was_sent=was_sent))
            self.carriers.drop_cancelled()
            self.flush_soon()
        else:
            late = CallAborted(self._timeout_of(call, seconds, was_sent=True))
            self.pending.finish_loading(number, late)
        if isinstance(call, StreamReader) and call.is_collecting():  # its last items
            call.fail(CallAborted(self._timeout_of(call, seconds, was_sent=True)))

    def _timeout_of(self, call: ReplyReceiver, seconds: float, *, was_sent: bool) -> CallTimeout:
        what = "may have run" if was_sent else "was not sent"
        peer, method = self.peer.name, call_name(call.target)
        text = f"{method} on worker {peer!r} timed out after {in_seconds(seconds)}; it {what}"
        text += self.questions.text_of(call.number)
        return CallTimeout(text, worker=peer, method=method, may_have_run=was_sent)

    def grant(self, number: int, credit: int) -> None:
        """Let the callee send further items of a stream."""
        self.state.credits.append((number, credit))
        self.flush_soon()

    def _holding(self) -> Holding | None:
        """Return what holds calls until the peer is reached, None if nothing does."""
        return self._introductions.holding if self.phase is Phase.OPENING else None

    def _limit_opening(self, number: int) -> None:
        """Bound the time for which a call waits for a peer that does not serve yet."""
        if (holding := self._holding()) is not None:
            seconds = holding.timeout
            self._opening_limits.append(
                self.loop.call_later(seconds, self._give_up, number, seconds)
            )

    def _give_up(self, number: int, seconds: float) -> None:
        """End a call that was held for `seconds`, if it still is."""
        if (holding := self._holding()) is not None:
            self.pending.fail((number,), held_too_long(holding, self.peer.name, seconds))

    def _enter(self, phase: Phase) -> None:
        """Go forward to a phase."""
        self.phase = max(self.phase, phase)
        for timer in self._opening_limits:
            timer.cancel()
        self._opening_limits.clear()

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def start_sending(self, transport: asyncio.Transport, received: bytes = b"") -> None:
        """Send the calls that have waited for the connection, and handle what was received."""
        if self.phase is Phase.FINISHED:
            transport.abort()
            return
        self._enter(Phase.OPEN)
        self.start(transport)
        self.state.is_paused = False
        self.carriers.offer(self._peer.tensor_offer)
        self.flush()
        if received:
            self.feed(received)

    def pause_writing(self) -> None:
        self.state.is_paused = True

    def resume_writing(self) -> None:
        self.state.is_paused = False
        self.flush_soon()

    def on_all_sent(self) -> None:
        """Tell a peer that leaves that no call follows."""
        if self.phase is Phase.RETIRING:
            self._enter(Phase.RETIRED)
            self.send(RETIRE, b"")

    def on_payload_sent(self, size: int) -> None:
        """Count a message with a payload."""
        self._sender.count(size)

    def on_payload_failed(self, number: int, error: RpcError) -> None:
        """Fail a call whose payload did not arrive, and withdraw its slot."""
        if self.state.cancel(number):
            self.flush_soon()
        lost: RpcError | None = error
        if isinstance(error, WorkerLost):
            lost = self._observer.on_disconnect(self.peer.name, self.peer.id, error)
            if not error.may_have_run:  # the caller may call another worker
                lost = error
        if lost is not None:  # otherwise as in `_enter_lost`
            self.fail([number], lost)

    def fail(self, numbers: Sequence[int], error: RpcError) -> None:
        """End calls with an error."""
        self.window.answered(numbers)
        self.pending.fail(numbers, error)

    def abort(self, why: Exception | None = None) -> None:
        self.state.is_paused = True  # what is written now would be lost
        super().abort(why)

    def ping(self) -> None:
        """Ask the peer's event loop for a sign of life, between hosts at a new socket too.

        A router may have forgotten all paths. Then it is heard before it would be lost.
        """
        super().ping()
        if self.is_open and not self.is_local and self._knocking is None:
            context = contextvars.Context()
            knocking = self.loop.create_task(self._knock(), name="aiorpc-connect", context=context)
            knocking.add_done_callback(self._on_knocked)
            self._knocking = knocking

    def _on_knocked(self, _: "asyncio.Task[None]") -> None:
        self._knocking = None

    # ── receiving ───────────────────────────────────────────────────────────────────────────────

    def _on_carrier(self) -> None:
        """Let large results come by the carrier, too."""
        self._peer.tensor_offer = self.carriers.sockets.taken
        self.transfers.large_results.clear()

    def release_held(self, number: int) -> None:
        """Let the callee release what it holds of a call: nothing will collect it."""
        self.state.cancels.append(number)
        self.flush_soon()

    def on_read(self) -> None:
        """Resume the callers that have their results; the calls they make are sent together."""
        if self.state.queue:  # there may be room in the window now
            self.flush()
        if not (wake := self.pending.wake):
            return
        self.pending.wake, self.state.woken = [], len(wake)
        if len(wake) == 1:
            wake[0].resume()
        else:
            resume_all(wake, self.loop)

    def on_payload_reply(self, number: int, outcomes: Sequence[Any]) -> None:
        """Release a call, also a cancelled one, and deliver its results."""
        # The end of a stream comes on the connection, after its items: until then it has run.
        if not isinstance(self.pending.get(number), StreamReader):
            self.window.answered((number,))
        self.on_results([each for each in outcomes if each[1] is not STREAM_END])

    def on_results(self, outcomes: Sequence[Any]) -> None:
        """Deliver results that torch RPC has brought."""
        self.pending.deliver(outcomes)
        self.note_heard()
        self.on_read()

    # ── opening and closing ─────────────────────────────────────────────────────────────────────
    #
    # What ends it, and the phase that it enters:
    #   _on_opened       it could not be opened            LOST, or FINISHED if the peer may live
    #   leave            this process leaves or is told to FINISHED, and CLOSE is sent
    #   _retire          the peer leaves                   RETIRING, then RETIRED and its CLOSE
    #   on_close         CLOSE of the peer                 FINISHED
    #   on_broken        a frame that cannot be read       FINISHED; the channel closes
    #   on_end           the transport has ended           on one host LOST, else JUDGED by a ping
    #   on_peer_lost     the peer is lost, by any sign     FINISHED once the transport has ended
    # `_enter_finished` fails the calls, `_enter_lost` lets them wait for the reason of the loss.

    def open(self) -> None:
        """Start to connect, in a task."""
        opening = self._introductions.connect(self._peer, self.number, self.start_sending)
        context = contextvars.Context()  # without the deadline of the first caller
        self._opening = self.loop.create_task(opening, name="aiorpc-connect", context=context)
        self._opening.add_done_callback(self._on_opened)

    async def _dial(self, purpose: int) -> socket.socket:
        """Return a proven socket to the peer for tensors of this connection."""
        return await self._introductions.dial(self._peer, number_for(self.number, purpose))

    def _on_opened(self, opening: "asyncio.Task[None]") -> None:
        """Fail the pending calls if there is no connection."""
        if self.transport is not None:
            return
        self.ended.set()
        exc = asyncio.CancelledError() if opening.cancelled() else opening.exception()
        if isinstance(exc, WorkerLost):
            self._enter_lost(exc)
        elif isinstance(exc, RpcError):
            self._enter_finished(exc)
        elif exc is not None:  # otherwise it was open, and its end is judged
            self._enter_finished(WorkerUnreachable(self.peer.name, repr(exc)))

    def _retire(self, _: bytes) -> None:
        """Take no further calls, since the peer leaves; it is told after the last one is sent."""
        self._enter(Phase.RETIRING)
        self._observer.on_leave_message(self.peer.name, self.peer.id, "retires", "")
        self.flush()

    def leave(self, what: CloseReason, text: str, error: RpcError) -> None:
        """Close the connection; pending calls get `error`, the peer gets `what` and `text`."""
        self._fail_calls(error, recorded=what != "ended")  # torch answers them after a loop's end
        self._enter(Phase.FINISHED)
        if self.transport is not None:
            self.close(what, text)
        elif self._opening is not None:
            self._opening.cancel()

    def on_peer_lost(self, error: RpcError) -> None:
        """Fail all pending calls; a peer that was only unreachable gets their cancellations."""
        if self.ended.is_set():
            self._enter_finished(error)
        else:
            self._fail_calls(error, recorded=True)

    def _fail_calls(self, error: RpcError, *, recorded: bool) -> None:
        if sent := self.state.clear():
            self.state.cancels += sent
            self.pending.fail(sent, error)
        if unsent := [*self.pending]:
            self.pending.fail(unsent, error, were_sent=False)
        self.carriers.drop_cancelled()
        if self.is_open:
            self.flush_soon()
        for each in [*self._recorded_calls] if recorded else ():
            each.failed(error)

    def _enter_lost(self, error: WorkerLost) -> None:
        """End without a leave message; the calls of a process that ends wait for the reason."""
        self._enter(Phase.LOST)
        lost = self._observer.on_disconnect(self.peer.name, self.peer.id, error)
        if lost is not None:
            self._enter_finished(lost)

    def _enter_finished(self, error: RpcError) -> None:
        if self.phase is not Phase.FINISHED:
            self._enter(Phase.FINISHED)
            self._fail_calls(error, recorded=True)
            self._sender.close()

    def on_close(self, what: str, text: str) -> None:
        self._observer.on_leave_message(self.peer.name, self.peer.id, what, text)
        self._enter_finished(error_of_close(self.peer.name, what, text))

    def on_broken(self, exc: Exception) -> None:
        text = f"worker {self.peer.name!r} sent a frame, perhaps this result, that cannot be read"
        self._enter_finished(RemoteError(f"{text}: {exc!r}"))

    def on_loop_closed(self) -> None:
        """End the threads, which would keep this connection alive. From another loop."""
        self.carriers.close()

    def on_end(self, error: Exception | None) -> None:
        if self._knocking is not None:
            self._knocking.cancel()
        if error is None or self.phase is Phase.FINISHED:
            self._enter_finished(WorkerLeft(self.peer.name, "the connection was closed"))
        elif self.is_local:  # its process has ended
            self._enter_lost(WorkerLost(self.peer.name, f"its connection has ended: {error}"))
        else:
            self._lose_path(f"its connection has ended: {error}")

    def _lose_path(self, reason: str) -> None:
        """End without a leave message, where the path may have ended and not the process.

        What is between the machines may forget a path, or close it. The calls wait for the ping
        that follows, and fail as those of a lost worker if it fails. So do calls that are made
        meanwhile: over another connection they would overtake those that were not sent.
        """
        error = WorkerLost(self.peer.name, reason)
        known = self._observer.on_disconnect(self.peer.name, self.peer.id, error)
        if known is error:
            self._enter(Phase.JUDGED)
            self.state.is_paused = True
            context = contextvars.Context()
            self._judging = self.loop.create_task(
                self._judge_path(reason), name="aiorpc-connect", context=context
            )
            self._judging.add_done_callback(partial(self._on_judged, reason))
            return
        self._enter(Phase.LOST)
        if known is not None:
            self._enter_finished(known)

    async def _judge_path(self, reason: str) -> None:
        """Wait for the ping, and let another connection take the unsent calls to a living peer."""
        knocking = self.loop.create_task(self._knock(), name="aiorpc-connect")
        try:
            await self._observer.wait_until_probed(self.peer.name)
        finally:
            knocking.cancel()
        if self.phase is Phase.FINISHED:
            return
        if self._peer.is_lost and self._peer.error is not None:
            self._enter_finished(self._peer.error)
            return
        self._enter(Phase.LOST)
        if not self._is_successor or self._sender.messages + self._lone_calls:
            self._pass_on()

    async def _knock(self) -> None:
        """Ask for a proof at a new socket, unless the peer is heard soon.

        A router that has forgotten this path may have forgotten torch's as well, for good.
        """
        heard = self._peer.last_heard
        await asyncio.sleep(KNOCK_DELAY)
        if self._peer.last_heard != heard:
            return
        with contextlib.suppress(RpcError, OSError):
            (await self._dial(ARGUMENTS)).close()
            self._observer.on_proof(self._peer)

    def _on_judged(self, reason: str, judging: "asyncio.Task[None]") -> None:
        """End the calls that are left, also if the task was cancelled, with its loop for one."""
        if not judging.cancelled() and judging.exception() is None:
            reason = f"{reason}. It is alive, and the next call connects again"
        cut = WorkerUnreachable(self.peer.name, reason, may_have_run=True, may_return=True)
        self._enter_finished(cut)

    def _pass_on(self) -> None:
        """Let another connection send the calls that were not sent over this one.

        Unless this one had such calls, and has sent none: the next one would not either.
        """
        unsent = self.state.withdraw_pending()
        if not unsent:
            return
        with contextlib.suppress(RpcError):  # the peer leaves, or was replaced, or this one leaves
            successor = self._succeed(self.peer.name)
            if successor._peer is self._peer:
                for each in unsent:
                    successor._take_over(each, self)

    def _take_over(self, call: EncodedCall, earlier: "Connection") -> None:
        """Queue a call that was not sent over another connection."""
        self._is_successor = True
        earlier._passed_on += 1
        call, number = call.renumbered(self._calls), call.number
        self._calls += 1
        self.pending.take_over(call.number, earlier.pending, number)
        receiver = self.pending[call.number]
        receiver.connection, receiver.number = self, call.number
        if call.recorded is not None:
            call.recorded.move(self._recorded_calls)
        if self.phase is Phase.OPENING:
            self._limit_opening(call.number)
        self.state.submit(call, is_idle=False)
        self.flush_soon()
