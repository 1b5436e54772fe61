"""A connection: the calls of one event loop to one peer.

`SendState` decides when calls are sent; `PendingCalls` holds the receivers of their replies.
Payloads that do not travel on the connection go by torch RPC.
"""

import asyncio
import contextvars
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from .._aio.inline_future import InlineFuture, resume_all
from .._protocol.ancestry import entered_scopes, to_wire
from .._protocol.channel import Channel, channel_repr
from .._protocol.columns import STREAM_END
from .._protocol.connection_state import SendState
from .._protocol.frames import (
    CALLS,
    CONTROL,
    MAX_FRAME,
    RESULT,
    RESULTS,
    RETIRE,
    SEGMENTS,
    SHARED,
    SLOT,
    ProtocolError,
    frame,
)
from .._protocol.handshake import Party
from .._protocol.lone import decode_result, encode_call, encode_method
from .._protocol.messages import (
    Arguments,
    EncodedCall,
    EncodedTarget,
    decode_reply,
    dump_plain,
    encode_calls,
    encode_grouped_call,
    encode_target,
)
from .._protocol.payloads import UNKNOWN_OBJECT
from .._protocol.recording import RecordedCall, record_for_call
from .._protocol.segment_link import SegmentLink
from .._protocol.shared_arguments import MemberArguments
from .._protocol.shared_tensors import can_share
from .._protocol.targets import MethodTarget, Target, call_name, order_key, target_name
from .._protocol.tensors import TensorTable
from .._protocol.window import TRICKLE_INTERVAL, FlowWindow
from .._torch import rrefs
from .._torch.compat import WorkerInfo
from .._torch.profiling import call_event, profiler_enabled
from .._torch.rrefs import RRefId
from ..errors import CallTimeout, NotServing, RemoteError, RpcError, WorkerLost
from .answers import error_of_close
from .introduction import Holding, Introductions
from .pending import PendingCalls, ReplyReceiver
from .shared_transfers import SharedTransfers
from .stream_reader import Item, StreamReader
from .torch_transfers import TorchTransfers

MAX_METHODS = 256  # that a connection remembers the encoded targets of


class PeerObserver(Protocol):
    """An observer of peers, told by each connection. Its methods are thread-safe.

    Attributes:
        last_heard: time of the last message from each peer, written by the connections.
        lost_peers: peers whose next message `on_message` has to be told.
    """

    last_heard: dict[str, float]
    lost_peers: dict[str, RpcError]

    def on_message(self, peer: str) -> None:
        """Record a message from `peer`."""

    def on_disconnect(self, peer: str, number: int) -> None:
        """Handle the end of a connection to process `number` of `peer` without a leave message."""

    def on_leave_message(self, peer: str, number: int, what: str, text: str) -> None:
        """Handle the leave message of process `number` of `peer`: its kind and its reason."""

    def penalty(self, peer: str) -> int | None:
        """Return 0 for a live peer, None for a lost one; in between, a load to add."""

    async def wait_until_alive(self, peer: str) -> None:
        """Wait until a lost peer has rejoined. From any loop."""


class Connection(Channel):
    """A connection to one peer, one-way: calls go out, results come in. Confined to its loop.

    Args:
        me: this process.
        peer: the process that runs the calls.
        number: number of this connection among those of this process.
        observer: is told of the peer's messages and of the connection's end.
        sendable_devices: devices that tensors for the peer may be on, beside the CPU.

    Attributes:
        is_finished: whether the next call needs another connection.
    """

    def __init__(
        self,
        me: Party,
        peer: WorkerInfo,
        number: int,
        observer: PeerObserver,
        sendable_devices: Collection[torch.device] = (),
    ) -> None:
        super().__init__()
        self.peer = peer
        self._me = me
        self._key = (me.name, me.number, number)
        self._observer = observer
        self._sendable_devices = sendable_devices
        self._calls = self._messages = self._bytes = 0
        self._is_profiled = False  # whether a profiler recorded this thread at `_now`
        self._now = 0.0  # of the event-loop iteration of the last call
        self._pending = PendingCalls()
        self._state = SendState[EncodedCall](self._pending, FlowWindow(), self._on_dropped)
        self._trickle_timer: asyncio.TimerHandle | None = None
        self._transfers = TorchTransfers(peer, self._key, self._pending, self)
        self._segments = SegmentLink(self, self._loop)
        self._shared = SharedTransfers(self._segments, self._pending, self)
        self._methods: dict[str, _Method] = {}  # of lone calls, by name
        self._slot_keys: dict[int, Any] = {}  # objects of calls whose payloads go by torch
        self._wake: list[InlineFuture] = []  # resolved by the current read
        self._still_woken = 0  # callers that the read before woke, if this one brings no reply
        self._opening: asyncio.Task[None] | None = None
        self._holding: Holding | None = None  # until the peer is reached
        self._recorded_calls: set[RecordedCall] = set()  # unanswered, of autograd contexts
        self._error: RpcError | None = None  # reason of its end
        self._must_answer_retire = False
        self.is_finished = False

    def __repr__(self) -> str:
        return channel_repr(
            self, f"to {self.peer.name}", f"{len(self._pending)} waiting", self._state
        )

    @property
    def waiting(self) -> int:
        """The number of calls and streams that wait for a reply."""
        return len(self._pending)

    def pending_calls(self) -> list[tuple[str, str, float]]:
        """Return method, worker and `time.monotonic()` of each pending call. In any thread."""
        receivers = [*self._pending.values()]
        return [(target_name(each.source), self.peer.name, each.started) for each in receivers]

    def counters(self) -> dict[str, int]:
        """Return the counters of this connection, by the names of `Stats`."""
        return {
            "calls": self._calls,
            "in_flight": len(self._pending),
            "unsent": len(self._state),
            "messages": self._messages,
            "bytes_sent": self._bytes,
            "late": self._pending.late,
            "shared_messages": self._segments.sent,
        }

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def call(self, target: Target, args: Arguments, due: float | None) -> tuple[int, InlineFuture]:
        """Send a call; return its number and the future of its value, or of its failure."""
        future = InlineFuture(self._loop)
        is_plain = due is None and not args[1] and not self._pending
        if is_plain and self._state.may_send_alone() and self._send_lone(target, args[0], future):
            return self._calls - 1, future
        call = self._encode(target, False, args, due)
        self._submit(call, future, target)
        return call.number, future

    def _send_lone(self, target: Target, args: tuple[Any, ...], future: InlineFuture) -> bool:
        """Send a lone call at once, without the queue; return False if the queue has to."""
        if type(target) is not MethodTarget:
            return False
        known = self._methods.get(target.name)
        if known is None or known[0]() is not target.on:
            known = self._find_method(target)
        _, key, encoded = known
        if encoded is None or entered_scopes() or record_for_call() is not None:
            return False
        data = encode_call(self._calls, encoded, args)
        if data is None or key in self._transfers.large_results:
            return False
        number = self._calls
        self._calls += 1
        self._messages += 1
        self._bytes += len(data)
        self._state.window.sent(number, len(data))
        self._pending[number] = future
        future.target, future.source, future.started = key, target, time.monotonic()
        if profiler_enabled():
            self._record(future, target)
        self.write(data)
        return True

    def prepare(self, target: Target, arguments: MemberArguments) -> EncodedTarget:
        """Encode the target of a group's call, and check its arguments. Sends nothing."""
        if arguments.packed is not None:
            arguments.packed.check_sendable(self._sendable_devices, self.peer.name)
        return encode_target(target, _rref_id(target))

    def call_prepared(
        self, target: Target, encoded: EncodedTarget, args: MemberArguments, due: float | None
    ) -> tuple[int, InlineFuture]:
        """Send a call of a group after `prepare`. Returns the same as `call`."""
        future = InlineFuture(self._loop)
        is_plain = due is None and args.alone is not None and not self._pending
        if is_plain and self._state.may_send_alone():
            assert args.alone is not None
            if self._send_lone(target, args.alone, future):
                return self._calls - 1, future
        call = args.call(self._calls, encoded, due, to_wire(self._me.name))
        self._submit(call, future, target)
        return call.number, future

    def _find_method(self, target: MethodTarget) -> "_Method":
        """Return the encoded method of `target`, and remember it."""
        rref_id, name = _rref_id(target), target.name
        if rref_id is None:  # packing such an RRef forks it, as `_encode` does
            return _no_rref, ((0, 0), name), None
        if isinstance(target.on, tuple):
            return _no_rref, (rref_id, name), encode_method(rref_id, name)
        if len(self._methods) >= MAX_METHODS:
            self._methods.clear()
        encoded = encode_method(rref_id, name)
        known = self._methods[name] = weakref.ref(target.on), (rref_id, name), encoded
        return known

    def stream(
        self, target: Target, args: Arguments, due: float | None
    ) -> tuple[int, StreamReader]:
        """Send a call of a generator; return its number and the reader of its items."""
        call = self._encode(target, True, args, due)
        number = call.number  # the closure must not keep the arguments of the call
        reader = StreamReader(call_name(target), lambda credit: self._grant(number, credit))
        self._submit(call, reader, target)
        return number, reader

    def cancel(self, number: int) -> None:
        """Cancel a call: its caller does not wait any more."""
        was_pending = self._pending.pop(number, None) is not None
        if was_pending and self._state.cancel(number) and not self._loop.is_closed():
            self.flush_soon()

    def expire(self, number: int, seconds: float, target: Target) -> None:
        """End a call with CallTimeout: it has no result after `seconds`."""
        if self._holding is not None and self._holding.is_held(self.peer.name):
            self._release(number, seconds)
        elif number in self._pending:
            was_sent = self._state.cancel(number)
            what = "may have run" if was_sent else "was not sent"
            peer, method = self.peer.name, call_name(target)
            limit = round(seconds, 2) or seconds
            text = f"{method} on worker {peer!r} timed out after {limit:.3g} s; it {what}"
            error = CallTimeout(text, worker=peer, method=method, may_have_run=was_sent)
            self._pending.fail((number,), error)
            if was_sent:
                self.flush_soon()

    def _encode(
        self, target: Target, stream: bool, args: Arguments, due: float | None
    ) -> EncodedCall:
        known = self._methods.get(target.name) if type(target) is MethodTarget else None
        if known is not None and known[0]() is target.on:
            encoded = known[1]
        else:
            encoded = encode_target(target, _rref_id(target))
        batches = to_wire(self._me.name) if entered_scopes() else ()
        call = encode_grouped_call(self._calls, encoded, stream, args, due, batches)
        if call.header[2] is None:  # pickled as a whole
            call.cells[0].check_sendable(self._sendable_devices, self.peer.name)
        return call

    def _on_dropped(self, call: EncodedCall) -> None:
        """Forget a call that was cancelled before it was sent."""
        self._slot_keys.pop(call.number, None)
        if call.recorded is not None:
            call.recorded.failed("was cancelled before it was sent")

    def _grant(self, number: int, credit: int) -> None:
        self._state.credits.append((number, credit))
        self.flush_soon()

    def _submit(self, call: EncodedCall, receiver: ReplyReceiver, target: Target) -> None:
        self._calls += 1
        if (recording := record_for_call()) is not None:  # in an autograd context
            name = target_name(target)
            recorded = recording.begin(name, self.peer.name, self._recorded_calls)
            if recorded is not None:
                call = call._replace(by_torch=True, recorded=recorded)
        if self._transfers.large_results and call.header[0] in self._transfers.large_results:
            call = call._replace(by_torch=True)
        if call.by_torch:
            self._slot_keys[call.number] = _rref_id(target) or order_key(target)
        is_idle = not self._pending
        self._pending[call.number] = receiver
        if not self._flushing:  # the first of this iteration
            self._look_around()
        receiver.target, receiver.source, receiver.started = call.header[0], target, self._now
        if self._is_profiled:
            self._record(receiver, target)
        if self._holding is not None:
            seconds = self._holding.timeout
            self._loop.call_later(seconds, self._release, call.number, seconds)
        if self._state.submit(call, is_idle=is_idle):
            self.flush()
        else:
            super().flush_soon()

    def flush_soon(self) -> None:
        if not self._flushing:
            self._look_around()
            super().flush_soon()

    def _look_around(self) -> None:
        """Note for the calls of this iteration what is too expensive to find out for each."""
        self._now = time.monotonic()
        self._is_profiled = profiler_enabled()

    def _record(self, receiver: ReplyReceiver, target: Target) -> None:
        """Record a call in the trace of a profiler, until its receiver is released."""
        receiver.event = call_event("call", target_name(target), self._me.name, self.peer.name)

    def _release(self, number: int, seconds: float) -> None:
        """End a call that was held for `seconds`, if it still is."""
        if self._holding is not None and number in self._pending:
            seconds = round(seconds, 2) or seconds
            peer = self.peer.name
            is_held = self._holding.is_held(peer)
            reason = "is not attached" if is_held else "has not answered an introduction"
            remedy = ". Enter attach() there" if is_held else ""
            text = (
                f"worker {peer!r} {reason} after {seconds:.3g} s: the call failed; it has not run"
            )
            self._pending.fail((number,), NotServing(text + remedy))

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def start_sending(self, transport: asyncio.Transport, received: bytes = b"") -> None:
        """Send the calls that have waited for the connection, and handle what was received."""
        if self._error is not None:
            transport.abort()
            return
        self._holding = None
        self.start(transport)
        self._state.is_paused = False
        self._segments.offer()
        self.flush()
        if received:
            self.feed(received)

    def pause_writing(self) -> None:
        self._state.is_paused = True

    def resume_writing(self) -> None:
        self._state.is_paused = False
        self.flush_soon()

    def flush(self) -> None:
        if not self.is_open:
            return
        frames: list[bytes] = []
        payloads: list[EncodedCall] = []
        if (controls := self._state.controls()) is not None:  # before later calls
            frames.append(frame(CONTROL, dump_plain(controls)))
        while calls := self._state.take():
            frames += self._encode_frames(calls, payloads)
            if payloads or len(frames) > 1:  # the socket may be full
                self._write(frames)
                frames = []
                while payloads:
                    self._send_payload(payloads.pop())
        self._write(frames)
        if len(self._state) and self._trickle_timer is None and not self._state.is_paused:
            answers = self._state.window.answers
            self._trickle_timer = self._loop.call_later(TRICKLE_INTERVAL, self._trickle, answers)
        if self._must_answer_retire and not len(self._state):
            self._must_answer_retire = False
            self.write(frame(RETIRE, b""))

    def _write(self, frames: list[bytes]) -> None:
        if frames:
            data = frames[0] if len(frames) == 1 else b"".join(frames)
            self._bytes += len(data)
            self.write(data)

    def _trickle(self, answers: int) -> None:
        self._trickle_timer = None
        is_stuck = answers == self._state.window.answers and not self._state.is_paused
        if is_stuck and self.is_open:
            payloads: list[EncodedCall] = []
            self._write(self._encode_frames(self._state.force(), payloads))
            for call in payloads:
                self._send_payload(call)
        self.flush_soon()

    def _send_payload(self, call: EncodedCall) -> None:
        """Send the payload of a slot: in shared memory if possible, else by torch RPC."""
        by_torch = call.header[0] in self._transfers.large_results
        if by_torch or not self._shared.send_payload(call):
            self._transfers.send_payload(call)

    def send_by_torch(self, call: EncodedCall) -> None:
        """Send a payload that could not be copied to shared memory by torch RPC."""
        if self._error is None:
            self._transfers.send_payload(call)

    def _encode_frames(
        self, calls: Sequence[EncodedCall], payloads: list[EncodedCall]
    ) -> list[bytes]:
        """Return the frames of calls; calls that go by torch are added to `payloads`."""
        if not calls:
            return []
        if calls[0].by_torch:
            payloads.append(calls[0])
            number = calls[0].number
            return [frame(SLOT, dump_plain((number, self._slot_keys.pop(number, UNKNOWN_OBJECT))))]
        try:
            data = dump_plain(tuple(encode_calls(calls, time.monotonic(), TensorTable())))
        except Exception as exc:  # out of memory, for one; nothing was sent
            error = RpcError(f"a call to worker {self.peer.name!r} could not be sent: {exc}")
            self._fail([call.number for call in calls], error)
            return []
        if len(data) <= MAX_FRAME:
            self._messages += 1
            return [frame(CALLS, data)]
        if len(calls) == 1:
            return self._encode_frames([calls[0]._replace(by_torch=True)], payloads)
        return [each for call in calls for each in self._encode_frames([call], payloads)]

    def on_payload_sent(self, size: int) -> None:
        """Count a message that is not of this connection's frames."""
        self._messages += 1
        self._bytes += size

    def on_payload_failed(self, number: int, error: RpcError) -> None:
        """Fail a call whose payload did not arrive, and withdraw its slot."""
        if self._state.cancel(number):
            self.flush_soon()
        self._fail([number], error)
        if isinstance(error, WorkerLost):
            self._observer.on_disconnect(self.peer.name, self.peer.id)

    def _fail(self, numbers: Sequence[int], error: RpcError) -> None:
        self._state.window.answered(numbers)
        self._pending.fail(numbers, error)

    # ── receiving ───────────────────────────────────────────────────────────────────────────────

    def on_frame(self, kind: int, data: bytes) -> int:
        if kind == RESULT:
            number, value = decode_result(data)
            receiver = self._pending.get(number)
            if type(receiver) is not InlineFuture:  # a stream, or a cancelled call
                self._deliver(((number, value),))
                return 1
            del self._pending[number]
            self._state.window.answered((number,))
            if receiver.set_result(value):
                self._wake.append(receiver)
            return 1
        if kind == RETIRE:
            self._retire()
            return 0
        if kind == SHARED:
            results = self._shared.on_results(data)
            self._deliver(results)
            return 1
        if kind == SEGMENTS:
            self._on_segments(data)
            return 0
        if kind != RESULTS:
            raise ProtocolError(f"a frame from a callee must hold results, got kind {kind}")
        outcomes = decode_reply(data)
        self._deliver(outcomes)
        return len(outcomes)

    def _on_segments(self, data: bytes) -> None:
        self._still_woken = self._state.woken  # this frame wakes none, and the next call is alone
        could_send = self._segments.can_send
        self._segments.on_frame(data)
        if self._segments.can_send and not could_send:  # results come in segments, too
            self._transfers.large_results.clear()

    def _deliver(self, outcomes: Sequence[Any]) -> None:
        ended = self._pending.resolve(outcomes, self._wake, self.collect)
        self._state.window.answered(ended)

    def collect(self, key: Any, receiver: ReplyReceiver, item: Item | None) -> None:
        """Get a result that the callee holds, or await one that is on its way."""
        if not self._shared.announce(key, receiver, item):
            self._transfers.collect(key, receiver, item)

    def on_read(self) -> None:
        """Resume the callers that have their results; the calls they make are sent together."""
        observer, name = self._observer, self.peer.name
        observer.last_heard[name] = time.monotonic()
        if observer.lost_peers:
            observer.on_message(name)
        wake, self._wake = self._wake, []
        self._state.woken = len(wake) or self._still_woken
        self._still_woken = 0
        if self._state.queue:
            self.flush()
        if len(wake) == 1:
            wake[0].resume()
        else:
            resume_all(wake, self._loop)

    def on_payload_reply(self, number: int, outcomes: Sequence[Any]) -> None:
        """Release a call, also a cancelled one, and deliver its results."""
        self._state.window.answered((number,))
        # The end of a stream comes on the connection, after its items.
        self.on_results([each for each in outcomes if each[1] is not STREAM_END])

    def takes_shared(self, results: Any) -> bool:
        """Return whether the results in a reply of torch could have come in shared memory."""
        return self._segments.can_send and all(map(can_share, results[1]))

    def on_results(self, outcomes: Sequence[Any]) -> None:
        """Deliver results that torch RPC has brought."""
        self._deliver(outcomes)
        self.on_read()

    # ── opening and closing ─────────────────────────────────────────────────────────────────────

    def open(self, introductions: Introductions) -> None:
        """Start to connect, in a task."""
        self._holding = introductions.holding
        opening = self._open(introductions)
        context = contextvars.Context()  # without the deadline of the first caller
        self._opening = self._loop.create_task(opening, name="aiorpc-connect", context=context)
        self._opening.add_done_callback(self._on_opened)

    async def _open(self, introductions: Introductions) -> None:
        await introductions.connect(self.peer, self._key[2], self.start_sending)

    def _on_opened(self, opening: "asyncio.Task[None]") -> None:
        """Fail the pending calls if there is no connection."""
        if self.is_open:
            return
        exc = None if opening.cancelled() else opening.exception()
        if isinstance(exc, RpcError):
            self._finish(exc)
        else:
            self._finish(RpcError(f"worker {self.peer.name!r} cannot be connected: {exc!r}"))
        self.ended.set()
        if isinstance(exc, WorkerLost):
            self._observer.on_disconnect(self.peer.name, self.peer.id)

    def _retire(self) -> None:
        """Take no further calls, since the peer leaves; it is told after the last one is sent."""
        self.is_finished = self._must_answer_retire = True
        self.flush()

    def leave(self, what: str, text: str, error: RpcError) -> None:
        """Close the connection; pending calls get `error`, the peer gets `what` and `text`."""
        self._fail_calls(error)
        if what != "ended":  # after the loop's end torch still answers recorded calls
            self._fail_recorded(error)
        self._error = self._error or error
        self.is_finished = True
        if self._transport is not None:
            self.close(what, text)
        elif self._opening is not None:
            self._opening.cancel()

    def on_peer_lost(self, error: RpcError) -> None:
        """Fail all pending calls; a peer that was only unreachable gets their cancellations."""
        self._fail_calls(error)
        self._fail_recorded(error)

    def _fail_calls(self, error: RpcError) -> None:
        self._shared.fail(error)
        sent = self._state.clear()
        self._state.cancels += sent
        self._pending.fail(sent, error)
        self._pending.fail([*self._pending], error, were_sent=False)
        self.flush_soon()

    def _fail_recorded(self, error: RpcError) -> None:
        for recorded in [*self._recorded_calls]:
            recorded.failed(error)

    def _finish(self, error: RpcError) -> None:
        if self._error is None:
            self._error = error
            self.is_finished = True
            self.on_peer_lost(error)
            if self._trickle_timer is not None:
                self._trickle_timer.cancel()

    def on_close(self, what: str, text: str) -> None:
        self._observer.on_leave_message(self.peer.name, self.peer.id, what, text)
        self._finish(error_of_close(self.peer.name, what, text))

    def on_broken(self, exc: Exception) -> None:
        text = f"worker {self.peer.name!r} sent a frame, perhaps this result, that cannot be read"
        self._finish(RemoteError(f"{text}: {exc!r}"))

    def on_end(self, error: Exception | None) -> None:
        self._segments.close()
        if error is not None and self._error is None:
            self._observer.on_disconnect(self.peer.name, self.peer.id)
            self._finish(WorkerLost(self.peer.name, f"its connection has ended: {error}"))
        self._finish(NotServing(f"the connection to worker {self.peer.name!r} was closed"))


_Method = tuple[Callable[[], Any], EncodedTarget, bytes | None]
"""A method of an RRef: a weak reference to the RRef, and the target for groups and lone calls."""


def _no_rref() -> None:
    return None


def _rref_id(target: Target) -> RRefId | None:
    """Return the RRef id of a call's object, None if only torch can find the object."""
    on = target.on
    return on if on is None or isinstance(on, tuple) else rrefs.rref_id(on)
