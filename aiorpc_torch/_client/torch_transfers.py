"""Values of one connection that travel by torch RPC: payloads of calls, and held results.

A payload is large, on a device or of an autograd context; its call's slot is on the connection. A
held result is large: the connection announces it, and this module collects it. The caller's device
maps count for torch's replies, so the value comes as one. For a message that the callee sends, the
callee's maps would count. (tests/loopback/test_payloads.py)
"""

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from .._endpoint import entry_points
from .._torch.cuda import note_delivered
from .._torch.transport import classify_error, enter_context_id, send, when_done
from .._wire.blocks import can_place
from .._wire.exceptions import RemoteFailure
from .._wire.messages import EncodedCall, decode_reply, dump_payload, encode_calls
from .._wire.payloads import detach_data, message_for_torch
from .._wire.pickling import CallAborted
from .._wire.plain import dump
from .._wire.tensor_table import TensorTable
from .._wire.tensors import INLINE_BYTES, size_of
from .._wire.wire_targets import EncodedTarget
from ..errors import RemoteError, RpcError, WorkerLost
from .pending import ReplyReceiver
from .stream_reader import Item, StreamReader

if TYPE_CHECKING:
    from .connection import Connection

log = logging.getLogger("aiorpc_torch")

MAX_LARGE_RESULTS = 1024  # remembered targets of one connection


class TorchTransfers:
    """The values that one connection sends and receives by torch RPC."""

    def __init__(self, connection: "Connection") -> None:
        self._peer = connection.peer
        self._key = connection.key
        self._pending = connection.pending
        self._connection = connection
        self.large_results: set[EncodedTarget] = set()
        """Targets whose last result was large: the next call goes by torch both ways."""

    # ── payloads ────────────────────────────────────────────────────────────────────────────────

    def send_payload(self, call: EncodedCall) -> None:
        """Send the payload of a slot."""
        number, recorded = call.number, call.recorded
        context, table = -1 if recorded is None else recorded.context, TensorTable()
        try:
            calls = encode_calls((call,), time.monotonic(), table)
            data, tensors = message_for_torch(dump_payload(self._key, context, calls), table)
            self._connection.on_payload_sent(len(data) + sum(map(size_of, tensors)))
            if recorded is None:
                answer = send(self._peer, entry_points.payload, data, tensors)
            else:
                with torch.enable_grad(), enter_context_id(context):
                    tensors = recorded.attach_arguments(tensors)
                    answer = send(self._peer, entry_points.payload, data, tensors)
        except Exception as exc:  # nothing was sent
            error = classify_error(exc, self._peer.name)
            if isinstance(error, WorkerLost):
                error.may_have_run = False
            if recorded is not None:
                recorded.failed(error)
            self._connection.on_payload_failed(number, error)
            return
        first = None if recorded is None else recorded.done
        when_done(answer, lambda done: self._on_reply(number, done), first)

    def _on_reply(self, number: int, answer: Any) -> None:
        """Deliver the results in the reply to a payload."""
        outcomes = _read_answer(answer, self._peer.name)
        if isinstance(outcomes, RpcError):
            self._connection.on_payload_failed(number, outcomes)
            return
        own = [each for each in outcomes if each[0] == number]
        receiver = self._pending.get(number)
        if not own and receiver is not None:
            error = RemoteError(f"worker {self._peer.name!r} received a call and sent no result")
            self._connection.on_payload_failed(number, error)
            return
        if self.large_results and receiver is not None:
            # Do the next results like these need a message of torch RPC?
            results, is_carried = answer.wait(), self._connection.carriers.chosen is not None
            data, tensors = (results, ()) if isinstance(results, bytes) else results[:2]
            is_inline = isinstance(results, bytes) or (not tensors and len(data) <= INLINE_BYTES)
            if is_inline or (is_carried and all(map(can_place, tensors))):
                self.large_results.discard(receiver.encoded)
        self._connection.on_payload_reply(number, own)

    # ── held results ────────────────────────────────────────────────────────────────────────────

    def collect(self, key: Any, receiver: ReplyReceiver, item: Item | None) -> None:
        """Request a result that the callee holds."""
        if item is None and len(self.large_results) < MAX_LARGE_RESULTS:
            self.large_results.add(receiver.encoded)
        self._connection.on_payload_sent(0)
        peer = self._peer.name
        try:
            answer = send(self._peer, entry_points.collect, dump((self._key, key)))
        except Exception as exc:  # the callee still holds it
            self._connection.release_held(key[0] if isinstance(key, tuple) else key)
            # Later: the connection is about to resume the callers of other results.
            later = asyncio.get_running_loop().call_soon
            later(self._on_collected, key, receiver, item, classify_error(exc, peer))
        else:
            when_done(
                answer,
                lambda done: self._on_collected(key, receiver, item, _read_answer(done, peer)),
            )

    def _on_collected(
        self, key: Any, receiver: ReplyReceiver, item: Item | None, answer: list[Any] | RpcError
    ) -> None:
        if isinstance(answer, RpcError):
            value: Any = CallAborted(answer)
        else:
            gone = RemoteError(f"worker {self._peer.name!r} no longer holds the result")
            value = next((found for own, found in answer if own == key), CallAborted(gone))
        if item is not None and isinstance(receiver, StreamReader):
            self._pending.fill(receiver, item, value)
        elif self._pending.get(key) is receiver:
            self._connection.on_results([(key, value)])
        else:  # it was cancelled: it leaves the window, and no other reply to it comes
            self._connection.on_payload_reply(key, ())


def _read_answer(answer: Any, peer: str) -> list[Any] | RpcError:
    """Return the results in a completed reply of torch, or the error that it stands for."""
    try:
        results = answer.wait()
        if isinstance(results, RemoteFailure):  # the peer does not serve, or rejected the message
            results.raise_()
    except RpcError as exc:
        return exc
    except BaseException as exc:  # the peer chooses the class: SystemExit must not be raised here
        return classify_error(exc, peer)
    try:
        # A recorded reply has further parts, for gradients.
        data, tensors = (results, ()) if isinstance(results, bytes) else results[:2]
        note_delivered(tensors)
        return decode_reply(*detach_data(data, tensors))
    except BaseException as exc:
        log.warning("a reply of worker %r cannot be read: %r", peer, exc)
        return RemoteError(f"a reply of worker {peer!r} cannot be read: {exc!r}")
