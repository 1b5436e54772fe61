"""Replies in an autograd context that are completed by another thread than the call's."""

from typing import Any

import pytest
import torch

from aiorpc_torch._context.recording import ContextRecord
from aiorpc_torch._server.reply import DeferredReply
from aiorpc_torch.testing import on_a_thread
from tests.support.cuda_doubles import ZERO, CudaTensor, Streams


class Future:
    """The future of torch's message: notes the stream on which it is completed."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.answer: Any = None

    def set_result(self, answer: Any) -> None:
        self._streams.log.append(("complete", str(self._streams.current_stream(ZERO))))
        self.answer = answer


@pytest.mark.parametrize("is_pending", [False, True])
def test_the_reply_is_behind_the_kernels_of_the_result(
    monkeypatch: pytest.MonkeyPatch, is_pending: bool
) -> None:
    """On whichever stream the thread is that completes it."""
    streams = Streams().install(monkeypatch)
    record, future, nested = ContextRecord(1), Future(streams), object()
    if is_pending:
        record.hold(nested, "a nested call")
    tensor = CudaTensor.on(ZERO)
    with streams.stream(streams.new_stream(ZERO)):
        DeferredReply(future, record).set_result((b"data", [tensor]))
    if is_pending:
        assert future.answer is None
        with streams.stream(streams.new_stream(ZERO)):
            on_a_thread(lambda: record.release(nested))
    other = "stream 2" if is_pending else "stream 1"
    assert [entry for entry in streams.log if entry[0] != "new"] == [
        ("record", "stream 1"),
        ("wait", other, "stream 1"),
        ("complete", other),
    ]
    assert tensor.used_on == [other]


def test_replies_without_tensors_on_a_device_have_no_fence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams().install(monkeypatch)
    future = Future(streams)
    DeferredReply(future, ContextRecord(1)).set_result((b"data", [torch.ones(1)]))
    assert [entry[0] for entry in streams.log] == ["complete"]


def test_a_result_that_is_freed_while_the_reply_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets the error; torch does not get the tensor."""
    record, future, nested = ContextRecord(1), Future(Streams().install(monkeypatch)), object()
    record.hold(nested, "a nested call")
    tensor = torch.ones(3)
    DeferredReply(future, record).set_result((b"data", [tensor]))
    tensor.untyped_storage().resize_(0)
    record.release(nested)
    with pytest.raises(ValueError, match="its storage was freed"):
        future.answer.raise_()
