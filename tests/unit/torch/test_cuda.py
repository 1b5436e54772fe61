"""The order of CUDA work by doubles of streams, and tensors in forms that torch can send."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from aiorpc_torch._torch.cuda import (
    copy_of,
    fence_tensors,
    fence_tree,
    note_delivered,
    sendable,
    stream_of_coroutine,
)
from tests.support.cuda_doubles import ONE, ZERO, CudaTensor, Streams


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams().install(monkeypatch)


# ── fences ──────────────────────────────────────────────────────────────────────────────────────


def test_a_fence_orders_the_streams_of_two_threads(streams: Streams) -> None:
    """Recorded on the streams that are current then, awaited by those that are current later."""
    tensors = [CudaTensor.on(ZERO), CudaTensor.on(ONE), CudaTensor.on(ZERO)]
    with streams.stream(streams.new_stream(ZERO)):
        fence = fence_tree({"x": tensors[:2], "y": (tensors[2], torch.ones(1), 3)})
    assert fence is not None
    recorded = {("record", "stream 1"), ("record", "default of cuda:1")}
    assert {*streams.log[1:]} == recorded
    del streams.log[:]
    with streams.stream(streams.new_stream(ZERO)):
        fence.wait()
    assert {*streams.log[1:]} == {
        ("wait", "stream 2", "stream 1"),
        ("wait", "default of cuda:1", "default of cuda:1"),
    }
    used = [tensor.used_on for tensor in tensors]
    assert used == [["stream 2"], ["default of cuda:1"], ["stream 2"]]


def test_sparse_tensors_have_no_record_stream(streams: Streams) -> None:
    sparse = CudaTensor.on(ZERO, torch.sparse_coo)
    fence = fence_tensors([sparse])
    assert fence is not None
    fence.wait()
    assert ("wait", "default of cuda:0", "default of cuda:0") in streams.log
    assert sparse.used_on == []


def test_nothing_is_done_for_tensors_on_the_cpu(streams: Streams) -> None:
    assert fence_tensors([torch.ones(1)]) is None
    assert fence_tree([{"x": torch.ones(1)}]) is None
    note_delivered([torch.ones(1)])
    assert streams.log == []


def test_results_that_arrive_are_used_on_the_streams_of_waiting_coroutines(
    streams: Streams,
) -> None:
    """Of the same device, and only while a coroutine waits there."""
    here, there = streams.new_stream(ZERO), streams.new_stream(ONE)
    tensors = [CudaTensor.on(ZERO) for _ in range(3)]
    with stream_of_coroutine(here), stream_of_coroutine(there):
        note_delivered([tensors[0]])
        with stream_of_coroutine(here):
            note_delivered({"x": tensors[1]})
    note_delivered(tensors[2])
    assert [tensor.used_on for tensor in tensors] == [["stream 1"], ["stream 1"], []]


# ── tensors that torch can send ─────────────────────────────────────────────────────────────────


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def views(device: str) -> list[Tensor]:
    whole = torch.arange(6.0).view(2, 3) if device == "cpu" else torch.empty(2, 3, device=device)
    return [whole, whole.T, whole[1], whole[:0], whole.new_empty(0, 4)]


@given(st.lists(st.tuples(st.sampled_from(["cpu", "meta"]), st.integers(0, 4)), max_size=6))
def test_what_is_sent(picked: list[tuple[str, int]]) -> None:
    """Equal tensors in the same order; each on a device has memory.

    With several devices no two share memory. On the CPU alone they are the same objects.
    """
    pool = {device: views(device) for device in ("cpu", "meta")}
    tensors = [pool[device][index] for device, index in picked]
    found = sendable(tensors)
    assert [(each.shape, each.dtype, each.device) for each in found] == [
        (each.shape, each.dtype, each.device) for each in tensors
    ]
    devices = {device for device, _ in picked}
    for sent, given_ in zip(found, tensors, strict=True):
        if sent.device.type == "cpu":
            assert torch.equal(sent, given_)
        else:
            assert sent.untyped_storage().nbytes() > 0
    if devices <= {"cpu"}:
        assert all(sent is one for sent, one in zip(found, tensors, strict=True))
    if len(devices) > 1:
        assert len({storage(each) for each in found}) == len(found)


def test_one_device_keeps_what_is_shared() -> None:
    """Only the copies of `x` and of `x.T` beside another device are apart."""
    x = torch.empty(2, 3, device="meta")
    alone = sendable([x, x.T])
    assert storage(alone[0]) == storage(alone[1])
    assert alone[1] is not x


@pytest.mark.parametrize("wrap", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("shape", [(2,), (0, 3)])
def test_copies_are_a_part_of_the_graph(wrap: Any, shape: Sequence[int]) -> None:
    """Also while a coroutine waits in its no_grad() on this thread."""
    leaf = torch.ones(shape, device="meta", requires_grad=True)
    y = leaf * 2
    with wrap():
        found = sendable([y, y, torch.ones(1)])
    assert found[1].requires_grad
    assert found[1].grad_fn is not None
    with wrap():
        assert copy_of(leaf).grad_fn is not None
        assert not copy_of(torch.ones(1)).requires_grad


def test_sparse_tensors_beside_a_device_are_refused() -> None:
    sparse = torch.eye(2).to_sparse()
    assert sendable([sparse])[0] is sparse
    with pytest.raises(ValueError, match="sparse_coo on cpu cannot be sent"):
        sendable([sparse, torch.ones(1, device="meta")])
