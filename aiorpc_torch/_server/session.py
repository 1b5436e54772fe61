"""The callee's end of one connection: calls in, results out.

A session knows the calls that run, those that wait for a payload, and the results held for their
caller.
"""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from time import monotonic
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .._carrier.choice import Carriers
from .._channel import Channel, channel_repr
from .._peers.peers import Peer, State
from .._torch import devices
from .._torch.rrefs import RRefId
from .._wire.columns import FAILED, CellKind
from .._wire.exceptions import RemoteFailure
from .._wire.frames import (
    CALLS,
    CONTROL,
    RESULTS,
    RETIRE,
    SLOT,
    WHERE,
    frame,
    header,
)
from .._wire.messages import (
    EncodedResult,
    Group,
    SessionKey,
    encode_lone_result,
    encode_reply,
    load_calls,
)
from .._wire.payloads import message_for_torch
from .._wire.pickling import PickledValue
from .._wire.plain import reader
from .._wire.slots import Slots
from .._wire.staged import stage
from .result_sender import ResultSender

log = logging.getLogger("aiorpc_torch")

_ALIVE = State.ALIVE
_read_control = reader(tuple[list[int], list[tuple[int, int]]])
_read_slot = reader(tuple[int, RRefId | str | None])


class Payload(NamedTuple):
    """A call that came by torch RPC, apart from its slot, and the future of the reply."""

    groups: Sequence[Group]
    tensors: Sequence[Tensor]
    reply: Any
    context: int
    fence: Any


class Handler(Protocol):
    """The receiver of a session's calls."""

    def start_calls(
        self, session: "Session", groups: Sequence[Group], tensors: Sequence[Tensor] = ()
    ) -> int:
        """Start the calls of a frame, in order; return their number.

        `tensors` are those in shared memory.
        """

    def start_payload_call(self, session: "Session", payload: Payload) -> None:
        """Start a call whose payload has arrived."""

    def start_held_call(self, call: Any) -> None:
        """Start a call that waited for the payload of an earlier call."""

    def cancel(self, call: Any) -> None:
        """Cancel a call."""

    def on_created(self, created: Any) -> None:
        """Note that a caller has created an object. In any thread."""

    def on_question(self, session: "Session", data: bytes) -> None:
        """Answer a question where calls of the session stand."""

    def on_message(self, peer: Peer) -> None:
        """Note a message of a caller that is not alive."""

    def on_session_end(self, session: "Session", what: str, text: str) -> None:
        """Handle the end of the connection; `what` is "lost" if no last frame came."""


class Session(Channel):
    """One connection from the worker `caller`. Results may come from any thread."""

    HIGH_WATER = 8 << 20
    """Bytes of unsent results at which reading pauses. Running calls never pause it: plain `def`s
    that hold all threads may wait for a call that is not read yet. A caller that cannot write still
    reads. So a paused callee waits for its caller's event loop only.
    (`test_a_peer_that_does_not_read_is_not_read_from`)"""

    def __init__(
        self,
        handler: Handler,
        peer: Peer,
        connection: int,
        call_on_loop: Callable[[Callable[[], None]], None],
        mapped: devices.DeviceMapping = devices.NO_DEVICES,
    ) -> None:
        super().__init__()
        self.caller = peer.name
        self.key: SessionKey = (peer.name, peer.worker_id, connection)
        self._peer = peer
        self.calls: dict[int, Any] = {}
        self.slots: Slots[Any] = Slots()
        self.heads: dict[bytes, Any] = {}  # of groups of calls
        self.retired = asyncio.Event()  # set when no further call comes
        self.served = 0
        self.read_at = 0.0  # `time.monotonic()` of the last message with calls
        self.events: dict[int, Any] = {}  # of calls that are recorded: `timings.CallRecord`
        self._handler = handler
        self._call_on_loop = call_on_loop
        self._mapped = mapped
        self._loop_thread = get_ident()
        self._carriers = Carriers(self, self._loop)
        self._results = ResultSender(self, peer.name, self._carriers, self.calls)

    def __repr__(self) -> str:
        return channel_repr(
            self, f"from {self.caller}", f"{len(self.calls)} running", self._results
        )

    @property
    def held_bytes(self) -> int:
        """Return the size of the held results in bytes. In any thread."""
        return self._results.held_bytes

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def on_frame(self, kind: int, data: bytes) -> int:
        if kind == CALLS:
            return self._handler.start_calls(self, load_calls(data))
        if kind == CONTROL:
            return self._on_control(*_read_control(data))
        if kind == SLOT:
            number, key = _read_slot(data)
            self._start_held(self.slots.open(number, key))
            return 1
        if (read := self._carriers.read.get(kind)) is not None:
            data, tensors = read(data)
            return self._handler.start_calls(self, load_calls(data), tensors)
        if (handle := self._carriers.news.get(kind)) is not None:
            handle(data)
            return 0
        if kind == RETIRE:
            self.retired.set()
            return 0
        if kind == WHERE:
            self._handler.on_question(self, data)
            return 0
        return super().on_frame(kind, data)

    def on_read(self) -> None:
        peer = self._peer
        peer.last_heard = monotonic()
        if peer.state is not _ALIVE:
            self._handler.on_message(peer)

    def admit(self, call: Any) -> bool:
        """Return whether a call may start now. Otherwise it starts after the payload before it."""
        return self.slots.admit(call.order_key, call)

    def on_payload(self, number: int, payload: Payload) -> None:
        """Handle a payload that came by torch RPC."""
        ready = None if self.ended.is_set() else self.slots.fill(number, payload)
        if ready is None:  # cancelled by the caller
            _complete_reply(payload.reply, ())
        else:
            self._start_held(ready)

    def hold(self, call: Any) -> None:
        """Hold a call, and the later ones of its object, until `start_loaded`."""
        self._start_held(self.slots.open(call.number, call.order_key))

    def start_loaded(self, call: Any) -> None:
        """Start a call that was held, in its turn."""
        ready = None if self.ended.is_set() else self.slots.fill(call.number, call)
        self._start_held((call,) if ready is None else ready)  # a cancelled one is answered

    def _start_held(self, items: Iterable[Any]) -> None:
        """Start calls that waited for a payload."""
        for item in items:
            if isinstance(item, Payload):
                self._handler.start_payload_call(self, item)
            else:
                self._handler.start_held_call(item)

    def _drop_held(self, item: Any) -> None:
        """End a cancelled call that was held back; torch awaits the reply of a payload."""
        if isinstance(item, Payload):
            _complete_reply(item.reply, ())
        else:
            self._handler.start_held_call(item)

    def _on_control(self, cancels: Sequence[int], grants: Sequence[tuple[int, int]]) -> int:
        for number in cancels:
            self._start_held(self.slots.drop(number))
            self._results.release(number)
            if (call := self.calls.get(number)) is not None:
                self._handler.cancel(call)
            if (held := self.slots.take(number)) is not None:  # waits for another payload
                self._drop_held(held)
        for number, credit in grants:
            call = self.calls.get(number)
            if call is not None:
                call.grant(credit)
        return len(cancels) + len(grants)

    def on_created(self, created: Any) -> None:
        """Note that the caller has created an object. In any thread."""
        self._handler.on_created(created)

    def check_path(self, timeout: float) -> None:
        super().check_path(timeout)
        self._carriers.sockets.check_path(timeout)

    # ── results ─────────────────────────────────────────────────────────────────────────────────

    def send_result(self, result: EncodedResult, reply: Any = None) -> None:
        """Send the result of an ended call, by torch if `reply` is given. In any thread."""
        if reply is not None:
            if self.events:
                self._call_on_loop(functools.partial(self._end_event, result[0]))
            _complete_reply(reply, (result,))
        elif get_ident() == self._loop_thread:
            self._queue_result(result)
        else:
            self._call_on_loop(functools.partial(self._queue_result, result))

    def send_small_result(self, number: int, kind: CellKind, cell: Any) -> None:
        """Send a result that has a place in a frame, at once if no call runs. In any thread."""
        if get_ident() != self._loop_thread:
            again = functools.partial(self.send_small_result, number, kind, cell)
            self._call_on_loop(again)
            return
        if not (self.calls or self._results.replies.results) and self.is_open:
            try:
                data = encode_lone_result(number, kind, cell)
            except Exception as exc:  # out of memory, for one: the queue answers with a failure
                log.debug("a result cannot be sent alone: %r", exc)
            else:
                if self.events:
                    self._end_event(number)
                self.write(header(len(data), RESULTS) + data)  # as `frame`, of small data
                return
        self._queue_result((number, kind, cell))

    def check_sendable(self, tensors: Iterable[Tensor]) -> None:
        """Raise for a tensor that torch cannot send back, since it would fail its whole message."""
        devices.check_sendable(tensors, self._mapped, self.caller)

    def stage(self, packed: PickledValue) -> PickledValue:
        """Return a result with tensors on devices as it travels. In the thread that has made it."""
        return stage(packed, self._mapped)

    def _queue_result(self, result: EncodedResult) -> None:
        if self.events:
            self._end_event(result[0])
        if self._is_closing or self.ended.is_set():
            return
        self._results.queue(result)

    def _end_event(self, key: Any) -> None:
        """End the event of an answered call. A profiler accepts that on the loop's thread only."""
        if type(key) is int:
            event = self.events.pop(key, None)
        else:  # at the end of a stream, which is free
            event = self.events.pop(key[0], None) if key[2] == 0 else None
        if event is not None:
            event.end()

    def collect(self, key: Any, reply: Any) -> None:
        """Complete `reply` with a held result, or with none if it was released."""
        result = self._results.collect(key)
        _complete_reply(reply, () if result is None else (result,))

    def flush(self) -> None:
        if self.is_open:
            self._results.flush()

    # ── end ─────────────────────────────────────────────────────────────────────────────────

    def has_work(self) -> bool:
        """Return whether a call is running or on its way, or a result waits to be collected."""
        return bool(self.calls or self.slots or self._results.held or self._carriers.has_work())

    def add_socket(self, purpose: int, sock: socket.socket) -> None:
        """Use a proven socket for tensors."""
        self._carriers.sockets.add_socket(purpose, sock)

    def retire(self) -> None:
        """Ask the caller to send no further calls; `retired` is set when it has answered."""
        if self.is_open:
            self.write(frame(RETIRE, b""))

    def pause_writing(self) -> None:
        self.pause_reading("full")

    def resume_writing(self) -> None:
        self.resume_reading("full")

    def on_close(self, what: str, text: str) -> None:
        self._handler.on_session_end(self, what, text)

    def on_end(self, error: Exception | None) -> None:
        self.retired.set()
        self._carriers.close()
        self._results.close()
        self.events.clear()
        if not self._received_close:
            self._handler.on_session_end(self, "lost" if error is not None else "ended", "")
        for item in self.slots.close():
            self._drop_held(item)


def _complete_reply(reply: Any, results: Sequence[EncodedResult]) -> None:
    """Complete the reply to a message of torch RPC, if it is one. In any thread."""
    if reply is None:
        return
    answer: Any = b""
    try:
        answer = _answer(results)
    except Exception as exc:  # e.g. no memory; the caller would wait for ever
        log.warning("a result cannot be encoded: %r", exc)
        failure = RemoteFailure.of(exc, "the callee")
        with contextlib.suppress(Exception):  # no memory for this either
            answer = _answer([(key, FAILED, failure) for key, _, _ in results])
    try:
        reply.set_result(answer)
    except Exception as exc:  # torch has stopped
        log.debug("reply not sent: %s", exc)


def _answer(results: Sequence[EncodedResult]) -> Any:
    """Return results as the value of torch's future."""
    data, tensors = encode_reply(results)
    return message_for_torch(data, tensors) if tensors or results else data
