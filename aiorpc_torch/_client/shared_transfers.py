"""Values of one connection whose tensors travel in shared memory: payloads of calls, and results.

A payload fills the slot of its call. An item of a stream that is still being copied at the callee
is announced first, so that items stay in order. (tests/loopback/test_shared_memory.py)
"""

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from .._protocol.columns import HeldResult
from .._protocol.messages import EncodedCall, decode_reply, encode_calls
from .._protocol.pickling import CallAborted
from .._protocol.plain import dump
from .._protocol.segment_link import SegmentLink
from .._protocol.tensors import TensorTable
from ..errors import RpcError
from .pending import PendingCalls, ReplyReceiver
from .stream_reader import Item, StreamReader
from .torch_transfers import TorchTransfers

log = logging.getLogger("aiorpc_torch")


class Owner(Protocol):
    """The connection of the transfers: its callbacks for their outcomes. Called on its loop."""

    @property
    def is_open(self) -> bool:
        """Return whether frames can be written."""

    def on_payload_sent(self, size: int) -> None:
        """Count a message with `size` bytes."""

    def write(self, data: bytes) -> None:
        """Write frames."""


class SharedTransfers:
    """The values that one connection sends and receives in shared memory.

    Args:
        link: shared memory of the connection.
        pending: the calls of the connection that wait for a reply.
        by_torch: sends and collects what shared memory does not take.
        owner: is told what came of each transfer.
    """

    def __init__(
        self, link: SegmentLink, pending: PendingCalls, by_torch: TorchTransfers, owner: Owner
    ) -> None:
        self._link = link
        self._pending = pending
        self._by_torch = by_torch
        self._owner = owner
        self._coming: dict[Any, tuple[StreamReader, Item]] = {}  # announced items, by key

    def send_payload(self, call: EncodedCall) -> None:
        """Send the payload of a slot: in shared memory if possible, else by torch RPC."""
        by_torch = call.recorded is not None or call.header[0] in self._by_torch.large_results
        if by_torch or not self._link.can_send or not self._send(call):
            self._by_torch.send_payload(call)

    def _send(self, call: EncodedCall) -> bool:
        tensors = TensorTable()
        try:
            data = dump(encode_calls((call,), time.monotonic(), tensors))
            is_pending = partial(self._pending.__contains__, call.number)
            return self._link.send(data, tensors, partial(self._on_written, call), is_pending)
        except Exception as exc:  # no memory, for one; its slot is open, so the call must be sent
            log.debug("a payload cannot be written to shared memory: %r", exc)
            return False

    def _on_written(self, call: EncodedCall, data: bytes | None) -> None:
        # Also for a cancelled call: the callee drops the payload and releases its memory.
        if not self._owner.is_open:
            return
        if data is None:
            self._by_torch.send_payload(call)
        else:
            self._owner.on_payload_sent(len(data) + call.size)
            self._owner.write(data)

    def collect(self, key: Any, receiver: ReplyReceiver, item: Item | None) -> None:
        """Await a result that is announced, or collect one that the callee holds."""
        if item is not None and item.value.is_coming and isinstance(receiver, StreamReader):
            self._coming[key] = receiver, item
        else:
            self._by_torch.collect(key, receiver, item)

    def on_segments(self, data: bytes) -> None:
        """Handle a SEGMENTS frame. Once the peer maps segments, results come in them, too."""
        could_send = self._link.can_send
        self._link.on_frame(data)
        if self._link.can_send and not could_send:
            self._by_torch.large_results.clear()

    def fail(self, error: RpcError) -> None:
        """Give the announced items an error: they will not come. Their streams may have ended."""
        coming, self._coming = self._coming, {}
        for receiver, item in coming.values():
            receiver.fill(item, CallAborted(error))

    def on_results(self, data: bytes) -> Sequence[Any]:
        """Deliver announced items of a SHARED frame; return its other results.

        Raises an exception of any class if the frame is malformed.
        """
        results = []
        for key, value in decode_reply(*self._link.read(data)):
            if (awaited := self._coming.pop(key, None)) is None:
                results.append((key, value))
            elif type(value) is HeldResult:
                receiver, awaited_item = awaited
                awaited_item.value = value
                self._by_torch.collect(key, receiver, awaited_item)
            else:
                awaited[0].fill(awaited[1], value)
        return results
