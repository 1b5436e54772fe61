"""Replies to messages in an autograd context, sent when all nested calls are answered."""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._context.recording import ContextRecord
from .._torch.autograd import attach_recv_edge, attach_send_edges, detach_all
from .._torch.cuda import StreamFence, fence_tensors
from .._torch.sendable import check_tensors
from .._wire.columns import FAILED
from .._wire.exceptions import RemoteFailure
from .._wire.messages import EncodedResult, encode_reply
from .._wire.payloads import message_for_torch

log = logging.getLogger("aiorpc_torch")


@dataclass(eq=False)
class DeferredReply:
    """A stand-in for the future of a message, which it completes when nested calls are answered.

    Otherwise torch would wait for gradients of the nested calls for ever, and their replies would
    create the released context again.
    """

    future: Any
    recording: ContextRecord

    def set_result(self, answer: Any) -> None:
        """Set the reply: bytes, or bytes and tensors. Call it on the streams of the tensors."""
        tensors = () if isinstance(answer, bytes) else answer[1]
        fence = fence_tensors(tensors)
        self.recording.when_settled(lambda: self._complete(answer, fence), close=True)

    def _complete(self, answer: Any, fence: StreamFence | None) -> None:
        if fence is not None:  # the last nested answer has come in a thread with other streams
            fence.wait()
        recording = self.recording
        ends = recording.recv_edges
        recording.close()
        data, tensors = (answer, []) if isinstance(answer, bytes) else answer
        lost = recording.lost[:]
        try:
            check_tensors(tensors)  # again: a storage may have been freed while the reply waited
        except ValueError as exc:
            self._send(RemoteFailure.of(exc, "the callee"))
            return
        # A suspended coroutine may have left its no_grad() on in the loop's thread.
        with torch.enable_grad():
            try:
                kept = tensors if recording.keeps_graph else detach_all(tensors)
                tensors, token = attach_send_edges(kept, ends)
            except Exception as exc:  # the caller must get a reply
                tensors, token = detach_all(tensors), None
                lost.append(f"autograd rejected a result: {exc!r}")
            answer = data, tensors, token, lost
            self._send(answer if tensors or token is not None or lost else data)

    def _send(self, answer: Any) -> None:
        try:
            self.future.set_result(answer)
        except Exception as exc:  # torch has stopped
            log.debug("reply in autograd context %d not sent: %s", self.recording.id, exc)


def reply_for(context: int, future: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the future that replies to a message in `context`, or in no context (-1)."""
    if context < 0:
        return future
    return DeferredReply(future, ContextRecord(context, attach_recv_edge(tensors)))


def complete_reply(reply: Any, results: Sequence[EncodedResult]) -> None:
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
