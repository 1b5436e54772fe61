"""Stacking on a CUDA device: parameters, rows, pinned memory."""

from typing import Any

import pytest
import torch

from aiorpc_torch._batching.collate import Collation, collate, rows_of, with_rows
from aiorpc_torch._batching.cuda_collate import CudaCollator
from tests.support.cuda_actors import (
    GPU,
    HERE,
    SIZE,
    fails_without,
    late,
    needs_device,
)

pytestmark = GPU


@pytest.fixture
def collator() -> CudaCollator:
    return CudaCollator(HERE)


@needs_device
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([torch.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ([1, 2, 3], torch.tensor([1, 2, 3])),
        ([torch.empty(0)] * 2, torch.empty(2, 0)),
        ([torch.tensor(1.0, dtype=torch.bfloat16)], torch.ones(1, dtype=torch.bfloat16)),
    ],
)
def test_parameters(collator: CudaCollator, values: list[Any], expected: torch.Tensor) -> None:
    with collator.on_stream(collator.record_event()):
        column = collate(values, collator)
        copied, done = collator.to_host({"x": column, "n": 3})
    assert column.device == HERE
    done.synchronize()
    assert copied["n"] == 3
    assert not copied["x"].is_cuda
    torch.testing.assert_close(copied["x"], expected)


@needs_device
def test_arrays(collator: CudaCollator) -> None:
    numpy = pytest.importorskip("numpy")
    with collator.on_stream(collator.record_event()):
        copied, done = collator.to_host(collate([numpy.ones(2, numpy.float32)] * 2, collator))
    done.synchronize()
    assert copied.tolist() == [[1.0, 1.0]] * 2


@needs_device
@pytest.mark.parametrize("device", ["cpu", HERE])
def test_rows(device: Any) -> None:
    """Joined and padded, from pinned memory or on the device; a number is in each row."""
    collator = CudaCollator(HERE, concat=True)
    calls = [(torch.full((count, 2), float(count), device=device), count) for count in (1, 0, 2)]
    with collator.on_stream(collator.record_event()):
        padded = with_rows(calls, rows_of(calls, Collation(concat=True, pad_to=(4,))))
        copied, done = collator.to_host(collate(padded, collator))
    done.synchronize()
    assert copied[0].tolist() == [[1.0] * 2, *[[2.0] * 2] * 3]
    assert copied[1].tolist() == [1, 2, 2, 2]


@needs_device
@fails_without("batch")
def test_tensors_that_are_on_the_device(collator: CudaCollator) -> None:
    """Nothing is copied to the CPU and back. The first time may wait for the device."""
    for values in (range(3), range(3, 6)):
        tensors = [late(float(n), 4) for n in values]
        with collator.on_stream(collator.record_event()):
            copied, done = collator.to_host(collate(tensors, collator))
        done.synchronize()
        assert copied.tolist() == [[float(n)] * 4 for n in values]


@needs_device
def test_gradients_go_through(collator: CudaCollator) -> None:
    """From a row to the result on the CPU."""
    row = torch.ones(3, requires_grad=True)
    with collator.on_stream(collator.record_event()):
        copied, done = collator.to_host(collate([row, row], collator) * 2)
    done.synchronize()
    copied.sum().backward()
    assert row.grad is not None
    assert row.grad.tolist() == [4.0] * 3


@needs_device
def test_pinned_memory_is_not_used_again_too_soon(collator: CudaCollator) -> None:
    """A column's is free for the next when its copy has been made, not when it was queued."""
    with collator.on_stream(collator.record_event()):
        torch.cuda._sleep(200_000_000)
        columns = [collate([torch.full((SIZE,), float(n))] * 2, collator) for n in range(8)]
        copied, done = collator.to_host(columns)
    done.synchronize()
    assert [float(each.mean()) for each in copied] == [float(n) for n in range(8)]
