"""How values are packed: tensors of every kind, and what cannot be read."""

import gc
import pickle
import tracemalloc

import pytest
import torch
from torch import Tensor

from aiorpc_torch._wire.exceptions import RemoteFailure
from aiorpc_torch._wire.payloads import message_for_torch
from aiorpc_torch._wire.pickling import pack, unpack
from aiorpc_torch._wire.tensors import INLINE_BYTES, from_bytes

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def across(value: object) -> object:
    packed = pack(value)
    found = unpack(packed.data, packed.tensors)
    assert not isinstance(found, RemoteFailure), found
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_small_tensors_ride_in_the_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every dtype and shape arrives equal, writable, and outside torch's table."""
    tensor = (torch.rand(shape) * 3).to(dtype)
    packed = pack(tensor)
    assert packed.tensors == []
    arrived = across(tensor)
    assert isinstance(arrived, Tensor)
    assert (arrived.dtype, arrived.shape) == (dtype, tensor.shape)
    assert torch.equal(arrived, tensor)
    arrived.zero_()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(INLINE_BYTES // 4 + 1),
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(1, dtype=torch.complex64).conj().imag,
        torch.eye(3).to_sparse(),
    ],
    ids=["large", "requires_grad", "conjugate", "negated", "sparse"],
)
def test_others_keep_to_the_table(tensor: Tensor) -> None:
    """What bytes cannot stand for, or should not, is left to torch."""
    assert pack(tensor).tensors == [tensor] or pack(tensor).tensors[0] is tensor


def test_size_counts_bytes_and_tensors() -> None:
    """What decides whether a call goes alone."""
    assert pack(torch.zeros(10_000)).size > 40_000
    assert pack(torch.zeros(INLINE_BYTES)).size > 4 * INLINE_BYTES
    assert pack(b"x" * 50_000).size > 50_000


def test_unreadable_is_a_failure() -> None:
    """Reading never raises."""
    outcome = unpack(b"not a pickle", [])
    assert isinstance(outcome, RemoteFailure)
    with pytest.raises(pickle.UnpicklingError):
        outcome.raise_()


def test_inference_tensors_are_small_too() -> None:
    """What a policy's forward pass under inference_mode returns."""
    with torch.inference_mode():
        tensor = torch.ones(3) * 2
    assert pack(tensor).tensors == []
    assert torch.equal(across(tensor), tensor)


@pytest.mark.promise("transport.views")
def test_views_are_compacted() -> None:
    """A view does not drag along the part of its storage that it does not show."""
    base = torch.zeros(400, 400)
    for view in (base[:160], base[:, :399], base[1:]):
        (sent,) = message_for_torch(b"", pack(view).tensors)[1]
        assert sent.untyped_storage().nbytes() == view.nbytes
        assert torch.equal(sent, view)
    assert pack(base[1:]).tensors[0].data_ptr() == base[1:].data_ptr(), "not copied yet"
    assert message_for_torch(b"", pack(base).tensors)[1][0] is base
    assert pack(base.t()).tensors[0].data_ptr() == base.data_ptr(), "all of it: not copied"


def test_a_row_that_is_kept_keeps_no_large_column() -> None:
    """Rows of a column of more than a page have memory of their own."""
    tracemalloc.start()
    try:
        kept = from_bytes((torch.uint8, (16,), ()), bytes(16 * 50_000), 50_000)[7]
        gc.collect()
        current, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept.nbytes == 16
    assert current < 100_000
