"""The unsent calls of a connection, and the way that each takes.

`SendState` decides when and how many. The large values of a call go in shared memory or on tensor
sockets if they can, else by torch RPC; all others in a frame.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .._carrier.carrier import Carrier
from .._carrier.choice import Carriers
from .._wire.blocks import ReadyMessage
from .._wire.connection_state import FlowWindow, SendState
from .._wire.frames import CALLS, CONTROL, SLOT, frame
from .._wire.messages import EncodedCall, encode_calls
from .._wire.plain import dump
from .._wire.tensor_table import TensorTable
from ..errors import NotInWorld, RpcError
from .call_encoder import slot_key
from .pending import PendingCalls

log = logging.getLogger("aiorpc_torch")


class CallWire(Protocol):
    """The connection of a sender."""

    @property
    def can_write(self) -> bool:
        """Return whether the transport takes what is written."""
        ...

    def write(self, data: bytes) -> None:
        """Write frames."""

    def flush(self) -> None:
        """Call the sender's `flush`, if frames may be sent."""

    def flush_soon(self) -> None:
        """Do so at the end of this loop iteration."""


class ByTorch(Protocol):
    """The sender of payloads by torch RPC."""

    def send_payload(self, call: EncodedCall) -> None:
        """Send the payload of a call, whose slot was sent."""


class CallSender:
    """The sender of one connection's calls. Confined to the event loop `loop`.

    Args:
        wire: the connection.
        peer: name of the callee.
        pending: its calls that wait for a reply.
        window: those that were sent.
        carriers: carry large CPU tensors.
        by_torch: its transfers by torch RPC.
        fail: ends the calls of these numbers with an error.

    Attributes:
        state: the calls that are not sent yet, and the window of unanswered ones.
        messages: number of messages sent.
        bytes: their bytes.
    """

    def __init__(
        self,
        wire: CallWire,
        peer: str,
        loop: asyncio.AbstractEventLoop,
        pending: PendingCalls,
        window: FlowWindow,
        carriers: Carriers,
        by_torch: ByTorch,
        fail: Callable[[Sequence[int], RpcError], None],
    ) -> None:
        self.state = SendState[EncodedCall](pending, window, _on_dropped, self._object_of)
        self.messages = self.bytes = 0
        self._wire = wire
        self._peer = peer
        self._loop = loop
        self._pending = pending
        self._carriers = carriers
        self._by_torch = by_torch
        self._fail = fail
        self._is_flushing = False
        self._trickle_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<CallSender {self.messages} messages, {self.state!r}>"

    def flush(self) -> None:
        """Send what may be sent now."""
        state = self.state
        if state.cancels or state.credits:  # before later calls
            self._write(CONTROL, dump(state.controls()))
        # A transport that has failed would drop them; here they are known to be unsent.
        self._is_flushing = True
        try:
            while self._wire.can_write and (calls := state.take()):
                if not calls[0].is_large:
                    self._send(calls)
                    continue
                try:
                    self._send_large(calls[0])
                except ReferenceError as exc:  # the world of its object was left meanwhile
                    self._fail([calls[0].number], NotInWorld(str(exc)))
        finally:
            self._is_flushing = False
        if state.has_unsent() and self._trickle_timer is None and not state.is_paused:
            window = state.window
            self._trickle_timer = self._loop.call_later(
                window.trickle_interval, self._trickle, window.answers
            )

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
        self._wire.flush()

    def _write(self, kind: int, data: bytes) -> None:
        self.bytes += len(data)
        self._wire.write(frame(kind, data))

    def _send(self, calls: Sequence[EncodedCall]) -> None:
        """Send calls in one frame."""
        try:
            data = frame(CALLS, dump(encode_calls(calls, time.monotonic(), TensorTable())))
        except Exception as exc:  # out of memory, for one; nothing was sent
            error = RpcError(f"a call to worker {self._peer!r} could not be sent: {exc}")
            self._fail([call.number for call in calls], error)
            return
        self.count(len(data))
        self._wire.write(data)

    # ── large calls ─────────────────────────────────────────────────────────────────────────────

    def _send_large(self, call: EncodedCall) -> None:
        """Send a call whose tensors were sent, or begin to send them; else send it by torch."""
        if call.shared is not None:
            self.messages += 1
            self.bytes += call.shared.size + call.size
            call.shared.send()
        elif call.by_torch:
            self._write(SLOT, dump((call.number, self._object_of(call))))
            self._by_torch.send_payload(call)
        elif (carrier := self._carriers.chosen) is None or not self._copy(call, carrier):
            call.by_torch = True
            if not self.state.must_wait(call):
                self._send_large(call)

    def _copy(self, call: EncodedCall, carrier: Carrier) -> bool:
        """Begin to send the tensors of a call; return False if it has to be sent otherwise."""
        self.state.begin_copy(call)
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
            self._wire.flush()

    def _object_of(self, call: EncodedCall) -> Any:
        return slot_key(self._pending[call.number].source)


def _on_dropped(call: EncodedCall) -> None:
    """Forget a call that was cancelled before it was sent."""
    if call.recorded is not None:
        call.recorded.failed("was cancelled before it was sent")
