"""The unsent calls of a connection, and the way that each takes.

`SendState` decides when and how many. The large values of a call go in shared memory or on tensor
sockets if they can, else by torch RPC; all others in a frame.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._carrier.carrier import Carrier
from .._wire.blocks import ReadyMessage
from .._wire.connection_state import Phase, SendState
from .._wire.frames import CALLS, CONTROL, SLOT, frame
from .._wire.messages import EncodedCall, encode_calls
from .._wire.plain import dump
from .._wire.tensor_table import TensorTable
from .._wire.wire_targets import NamedTarget, forget_unsent
from ..errors import NotInWorld, RpcError
from .call_encoder import slot_key

if TYPE_CHECKING:
    from .connection import Connection

log = logging.getLogger("aiorpc_torch")


class CallSender:
    """The sender of one connection's calls. Confined to its event loop.

    Attributes:
        state: the calls that are not sent yet, and the window of unanswered ones.
        messages: number of messages sent.
        bytes: their bytes.
    """

    def __init__(self, connection: "Connection") -> None:
        pending, window = connection.pending, connection.window
        self.state = SendState[EncodedCall](pending, window, _on_dropped, self._object_of)
        self.messages = self.bytes = 0
        self._connection = connection
        self._pending = pending
        self._is_flushing = False
        self._trickle_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<CallSender {self.messages} messages, {self.state!r}>"

    def flush(self) -> None:
        """Send what may be sent now."""
        connection, state = self._connection, self.state
        if not connection.is_open:
            return
        if state.cancels or state.credits:  # before later calls
            self._send_frame(CONTROL, dump(state.controls()))
        # A transport that has failed would drop them; here they are known to be unsent.
        is_failing = connection.transport.is_closing
        self._is_flushing = True
        try:
            while (state.queue or state.ready) and not is_failing() and (calls := state.take()):
                if not calls[0].is_large:
                    self.send(calls)
                    continue
                try:
                    self._send_large(calls[0])
                except ReferenceError as exc:  # the world of its object was left meanwhile
                    connection.fail([calls[0].number], NotInWorld(str(exc)))
        finally:
            self._is_flushing = False
        if (state.queue or state.ready) and self._trickle_timer is None and not state.is_paused:
            window = state.window
            self._trickle_timer = connection.loop.call_later(
                window.trickle_interval, self._trickle, window.answers
            )
        if connection.phase is Phase.RETIRING and not state:
            connection.on_all_sent()

    def close(self) -> None:
        """End the timer of a full window."""
        if self._trickle_timer is not None:
            self._trickle_timer.cancel()

    def count(self, size: int) -> None:
        """Count a message of `size` bytes."""
        self.messages += 1
        self.bytes += size

    def _trickle(self, answers: int) -> None:
        self._trickle_timer = None
        self.state.must_admit = answers == self.state.window.answers
        self.flush()

    def _send_frame(self, kind: int, data: bytes) -> None:
        """Send a frame that counts as no message: it cancels, grants credit, or keeps a place."""
        self.bytes += len(data)
        self._connection.write(frame(kind, data))

    def send(self, calls: Sequence[EncodedCall]) -> None:
        """Send calls in one frame."""
        try:
            data = frame(CALLS, dump(encode_calls(calls, time.monotonic(), TensorTable())))
        except Exception as exc:  # out of memory, for one; nothing was sent
            error = RpcError(
                f"a call to worker {self._connection.peer.name!r} could not be sent: {exc}"
            )
            self._connection.fail([call.number for call in calls], error)
            return
        self.count(len(data))
        self._connection.write(data)

    # ── large calls ─────────────────────────────────────────────────────────────────────────────

    def _send_large(self, call: EncodedCall) -> None:
        """Send a call whose tensors were sent, or begin to send them; else send it by torch."""
        if call.shared is not None:
            self.messages += 1
            self.bytes += call.shared.size + call.size
            call.shared.send()
        elif call.by_torch:
            self._send_frame(SLOT, dump((call.number, slot_key(self._pending[call.number].target))))
            self._connection.transfers.send_payload(call)
        elif (carrier := self._connection.carriers.chosen) is None or not self._copy(call, carrier):
            call.by_torch = True
            if not self.state.hold_back(call):
                self._send_large(call)

    def _copy(self, call: EncodedCall, carrier: Carrier) -> bool:
        """Begin to send the tensors of a call; return False if it has to be sent otherwise."""
        self.state.begin_copy(call, self._object_of(call))
        tensors = TensorTable()
        try:
            data = dump(encode_calls((call,), time.monotonic(), tensors))
            is_pending = functools.partial(self._pending.__contains__, call.number)
            then = functools.partial(self._on_copied, call)
            if carrier.send(data, tensors, then, is_pending):
                return True
        except Exception as exc:  # no memory, for one
            log.debug("the tensors of a call cannot be sent: %r", exc)
        self.state.stop_copy(call)
        return False

    def _on_copied(self, call: EncodedCall, message: ReadyMessage | None) -> None:
        """Send a call whose tensors the peer can reach, after those before it."""
        call.shared, call.by_torch = message, message is None
        if self.state.end_copy(call) and not self._is_flushing:  # a small copy ends inside
            self.flush()

    def _object_of(self, call: EncodedCall) -> Any:
        target = call.head.target
        if type(target) is NamedTarget and type(target.on) is tuple:  # the common case
            return target.on
        return slot_key(self._pending[call.number].target)


def _on_dropped(call: EncodedCall) -> None:
    """Forget a call that was cancelled before it was sent."""
    forget_unsent(call.head.target, call.cells)
    if call.recorded is not None:
        call.recorded.failed("was cancelled before it was sent")
