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
from .._protocol.messages import EncodedCall, decode_reply, dump_plain, encode_calls
from .._protocol.pickling import CallAborted
from .._protocol.segment_link import SegmentLink
from .._protocol.tensors import TensorTable
from ..errors import RpcError
from .pending import PendingCalls, ReplyReceiver
from .stream_reader import Item, StreamReader

log = logging.getLogger("aiorpc_torch")


class Owner(Protocol):
    """The connection, which is told what came of a transfer. On its loop."""

    def on_payload_sent(self, size: int) -> None:
        """Count a message with `size` bytes."""

    def write(self, data: bytes) -> None:
        """Write frames."""

    def send_by_torch(self, call: EncodedCall) -> None:
        """Send the payload of a slot by torch RPC."""

    def collect(self, key: Any, receiver: ReplyReceiver, item: Item | None) -> None:
        """Request a result that the callee holds."""


class SharedTransfers:
    """The values that one connection sends and receives in shared memory.

    Args:
        link: shared memory of the connection.
        pending: the calls of the connection that wait for a reply.
        owner: is told what came of each transfer.
    """

    def __init__(self, link: SegmentLink, pending: PendingCalls, owner: Owner) -> None:
        self._link = link
        self._pending = pending
        self._owner = owner
        self._coming: dict[Any, tuple[StreamReader, Item]] = {}  # announced items, by key

    def send_payload(self, call: EncodedCall) -> bool:
        """Send the payload of a slot; return False if torch RPC has to."""
        if not self._link.can_send or call.recorded is not None:
            return False
        tensors = TensorTable()
        try:
            data = dump_plain(tuple(encode_calls((call,), time.monotonic(), tensors)))
            is_pending = partial(self._pending.__contains__, call.number)
            return self._link.send(data, tensors, partial(self._on_written, call), is_pending)
        except Exception as exc:  # no memory, for one; its slot is open, so the call must be sent
            log.debug("a payload cannot be written to shared memory: %r", exc)
            return False

    def _on_written(self, call: EncodedCall, data: bytes | None) -> None:
        # Also for a cancelled call: the callee drops the payload and releases its memory.
        if data is None:
            self._owner.send_by_torch(call)
        else:
            self._owner.on_payload_sent(len(data) + call.size)
            self._owner.write(data)

    def announce(self, key: Any, receiver: ReplyReceiver, item: Item | None) -> bool:
        """Await an announced item of a stream; return False if it is held by the callee."""
        if item is None or not item.value.is_coming or not isinstance(receiver, StreamReader):
            return False
        self._coming[key] = receiver, item
        return True

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
                self._owner.collect(key, receiver, awaited_item)
            else:
                awaited[0].fill(awaited[1], value)
        return results
