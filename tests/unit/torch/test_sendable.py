"""Which tensors can be sent, whether all their elements are in memory, and what an error says."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from aiorpc_torch._torch.sendable import check_tensor, check_tensors, has_memory, is_plain
from tests.support.tensor_kinds import SENDABLE, UNSENDABLE, WARNINGS, freed, make

pytestmark = pytest.mark.filterwarnings(WARNINGS)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=4),
    st.integers(0, 6),
    st.integers(0, 40),
    st.sampled_from([torch.uint8, torch.float32, torch.complex64]),
)
def test_has_memory(
    dimensions: list[tuple[int, int]], offset: int, left: int, dtype: torch.dtype
) -> None:
    """It has if the address of each element is inside the storage."""
    shape, strides = [n for n, _ in dimensions], [stride for _, stride in dimensions]
    tensor = torch.empty(200, dtype=dtype).as_strided(shape, strides, offset)
    freed(tensor, left * dtype.itemsize)
    places = [offset]
    for n, stride in dimensions:
        places = [place + index * stride for place in places for index in range(n)]
    assert has_memory(tensor, tensor.nbytes) is all(place < left for place in places)


@pytest.mark.parametrize("kind", SENDABLE)
def test_what_can_be_sent(kind: str) -> None:
    tensor = make(kind)
    if type(tensor) is Tensor:
        check_tensors([tensor])
        check_tensor(tensor)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "shrunk, small",
            r"a tensor of shape \(5,\) and torch.float32 cannot be sent: its storage was freed or "
            r"made smaller \(resize_\), to 12 bytes for 20 bytes of elements. Send it while",
        ),
        ("csr, values freed", r"shape \(200, 200\) .* to 0 bytes for 800 bytes"),
        ("mkldnn", r"layout torch._mkldnn cannot be sent: send its to_dense\(\)"),
        ("nested", "a nested tensor of layout torch.strided .*: send one of layout=torch.jagged"),
        ("packed", r"torch.quint4x2 cannot be sent: send its dequantize\(\)"),
        ("meta", "on meta cannot be sent: it has no elements"),
        ("fake", "a FakeTensor cannot be sent: it has no elements. Send its shape and dtype"),
        ("functional", r"own \(DispatchKeySet\(.*Functionalize.*\)\) cannot be sent: .* outside"),
        ("in vmap", "FuncTorchBatched.* cannot be sent: send it from outside of transforms"),
    ],
)
def test_what_an_error_says(kind: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_tensors([make(kind)])


@pytest.mark.parametrize("kind", UNSENDABLE)
def test_what_cannot_be_sent(kind: str) -> None:
    """Subclasses are checked by their parts, when they are pickled."""
    tensor = make(kind)
    if type(tensor) is Tensor:
        with pytest.raises(ValueError, match="cannot be sent: "):
            check_tensors([torch.ones(1), tensor])


def test_is_plain() -> None:
    """Dense CPU tensors are, also those of inference mode."""
    plain = ("small", "expanded", "needs gradient", "inference")
    others = ("conjugated", "negated", "quantised", "coo", "csr", "meta", "mkldnn", "functional")
    assert all(is_plain(make(kind)) for kind in plain)
    assert not any(is_plain(make(kind)) for kind in others)
