"""Tensors in blocks: they arrive as they were, or the message is refused before memory is read."""

import ctypes
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, example, given, strategies as st
from torch import Tensor

from aiorpc_torch._wire.blocks import (
    ALIGNMENT,
    Block,
    Place,
    can_place,
    compact,
    place,
    share,
    tensors_at,
)
from aiorpc_torch._wire.columns import PLAIN, TENSOR, cell_bytes, direct_cell
from aiorpc_torch._wire.tensors import DTYPES, INLINE_BYTES, from_bytes

LARGE = INLINE_BYTES // 4 + 1  # elements of float32

SHAPES = st.lists(st.integers(0, 5), max_size=4)


class Spec(NamedTuple):
    """How to make a tensor: torch cannot print those of some dtypes."""

    dtype: str
    shape: list[int]
    data: bytes
    way: str

    def make(self) -> Tensor:
        """One that is dense, transposed or expanded."""
        dtype, elements = DTYPES[self.dtype], math.prod(self.shape)
        if not elements:
            return torch.empty(self.shape, dtype=dtype)
        size = elements * dtype.itemsize
        content = (self.data * (size // len(self.data) + 1))[:size]
        found = torch.frombuffer(bytearray(content), dtype=dtype).reshape(self.shape)
        if self.way == "transposed" and len(self.shape) > 1:
            return found.transpose(0, -1)
        return found.expand(3, *self.shape) if self.way == "expanded" else found


SPECS = st.builds(
    Spec,
    st.sampled_from(sorted(DTYPES)),
    SHAPES,
    st.binary(min_size=1, max_size=8),
    st.sampled_from(["dense", "transposed", "expanded"]),
)


def received(sent: list[Tensor]) -> list[Tensor]:
    """What a receiver gets, from copies of the blocks."""
    found = place(sent)
    assert found is not None
    blocks, places = found
    buffers = []
    for block in blocks:
        buffer = (ctypes.c_ubyte * max(1, block.size))()
        for (start, skip, size), storage in block.sources:
            ctypes.memmove(ctypes.addressof(buffer) + start, storage.data_ptr() + skip, size)
        buffers.append((buffer, len(buffer)))
    return tensors_at(places, buffers)


def content(tensor: Tensor) -> bytes:
    """The bytes of its storage."""
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if tensor.numel() else b""


@pytest.mark.filterwarnings("ignore:.*support is experimental")
@given(st.lists(SPECS, max_size=4))
def test_tensors_arrive_as_they_were(specs: list[Spec]) -> None:
    """Bit by bit, with dtype, shape and strides."""
    sent = [each.make() for each in specs]
    for one, other in zip(sent, received(sent), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert content(one) == content(other)
        assert not one.numel() or other.data_ptr() != one.data_ptr()


def test_views_of_one_storage_share_it() -> None:
    """As in a message of torch."""
    x = torch.arange(12.0).reshape(3, 4)
    one, other, third = received([x, x.t(), x.clone()])
    one.zero_()
    assert not other.any()
    assert third.any()


@pytest.mark.parametrize("needs", [False, True])
def test_requires_grad_travels(needs: bool) -> None:
    (found,) = received([torch.ones(3, requires_grad=needs)])
    assert found.requires_grad is needs
    assert found.is_leaf


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_what_torch_has_to_send() -> None:
    """Anything whose storage is not all of it, or not in this process's memory."""
    freed = torch.ones(10)
    freed.untyped_storage().resize_(0)
    for each in (
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch._neg_view(torch.ones(3)),
        torch.empty(3, device="meta"),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        freed,
    ):
        assert place([torch.ones(2), each]) is None
    with torch.inference_mode():
        assert can_place(torch.ones(3))


# ── what many receivers get ─────────────────────────────────────────────────────────────────────


def test_shared_tensors_have_one_block() -> None:
    """Every message finds the same block, and a block of its own for other tensors."""
    x, own = torch.ones(LARGE), torch.zeros(3)
    shared = share([x, x.view(1, -1)])
    blocks = [place([*shared, own]) for _ in range(2)]
    assert blocks[0] is not None
    assert blocks[1] is not None
    (one, rest), (other, further) = blocks[0][0], blocks[1][0]
    assert one is other
    assert one.is_shared
    assert rest is not further
    assert one.size < 2 * x.nbytes  # one storage
    assert [each.block for each in blocks[0][1]] == [0, 0, 1]


def test_what_is_shared_is_not_taken_for_what_is_sent_later() -> None:
    """The same tensor may be changed before it is sent again."""
    x = torch.ones(LARGE)
    (shared,) = share([x])
    assert shared is not x
    assert shared.data_ptr() == x.data_ptr()
    for other in (x, share([x])[0]):
        first, second = place([shared]), place([other])
        assert first is not None
        assert second is not None
        assert first[0][0] is not second[0][0]


def test_small_tensors_and_those_with_gradients_are_not_shared() -> None:
    """The one would gain nothing; the other could not be recorded."""
    small, graded = torch.ones(3), torch.ones(LARGE, requires_grad=True)
    assert share([small])[0] is small
    assert share([graded])[0] is graded


# ── malformed places ────────────────────────────────────────────────────────────────────────────

GOOD = Place(0, 0, 48, "float32", 0, (3, 4), (4, 1), False)


@pytest.mark.parametrize(
    "change",
    [
        {"block": 1},
        {"block": -1},
        {"start": 64},
        {"start": -64},
        {"size": 47},
        {"size": 1 << 62},
        {"dtype": "qint8"},
        {"dtype": "float33"},
        {"offset": 1},
        {"offset": -1},
        {"shape": (3, 5)},
        {"shape": (3,)},
        {"shape": (-3, -4)},
        {"shape": (1 << 40, 1 << 40), "strides": (0, 0)},
        {"shape": (1 << 32, 1 << 31), "strides": (0, 0)},
        {"strides": (5, 1)},
        {"strides": (-4, 1)},
        {"strides": (1 << 62, 1)},
    ],
    ids=str,
)
def test_a_malformed_place_is_refused(change: dict[str, Any]) -> None:
    """Before any memory is read."""
    memory = (ctypes.c_ubyte * 64)()
    tensors_at([GOOD], [(memory, 64)])
    with pytest.raises(ValueError):  # noqa: PT011
        tensors_at([GOOD._replace(**change)], [(memory, 64)])


NUMBERS = st.one_of(
    st.integers(0, 5), st.sampled_from([1 << 20, 1 << 31, 1 << 40, 1 << 61, 1 << 62, (1 << 63) - 1])
)
DIMENSIONS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4)


@pytest.mark.promise("shared.values")
@given(DIMENSIONS, st.integers(0, 3), st.sampled_from(["uint8", "float32", "complex128"]))
@example([(1 << 40, 0)], 0, "float32")
@example([(1 << 62, 0)], 0, "float32")
@example([((1 << 60) + 1, 0)], 0, "complex128")
@example([(0, 0), (1 << 31, 0), (1 << 40, 0)], 0, "float32")
def test_what_a_sender_takes_no_receiver_refuses(
    dimensions: list[tuple[int, int]], offset: int, dtype: str
) -> None:
    """Any shape and strides that torch makes: refused when it is encoded, or read as it was."""
    shape, strides = [each[0] for each in dimensions], [each[1] for each in dimensions]
    made = torch.arange(LARGE).to(DTYPES[dtype])
    try:
        sent = made.as_strided(shape, strides, offset)
    except RuntimeError:
        assume(False)
    for needs in (False, sent.is_floating_point()):
        each = sent.detach().requires_grad_(needs)
        try:
            kind, cell = direct_cell(each) or (PLAIN, None)
        except ValueError:
            assert sent.numel() * sent.itemsize >= 1 << 63
            continue
        if kind == TENSOR:
            (found,) = received([cell])
            assert found.stride() == cell.stride()
        else:
            (found,) = from_bytes(kind, cell, 1)
        assert (found.shape, found.dtype) == (each.shape, each.dtype)
        assert found.requires_grad is needs
        if each.numel():
            assert found[(0,) * each.dim()] == each[(0,) * each.dim()]
        assert 0 <= cell_bytes(kind, cell) <= made.nbytes


@given(st.tuples(*[st.integers(-3, 100)] * 3), SHAPES, SHAPES, st.integers(-1, 50))
def test_an_accepted_place_lies_in_its_segment(
    numbers: tuple[int, int, int], shape: list[int], strides: list[int], offset: int
) -> None:
    """Torch finds every element of it in the segment's bytes."""
    block, start, size = numbers
    given = Place(block, start, size, "int16", offset, (*shape,), (*strides,), False)
    buffer = (ctypes.c_ubyte * 128)(*[7] * 128)
    try:
        (found,) = tensors_at([given], [(buffer, 128)])
    except ValueError:
        return
    assert found.tolist() == torch.full(shape, 0x0707, dtype=torch.int16).tolist()


def test_a_block_knows_a_storage_once() -> None:
    block, x = Block(), torch.ones(10)
    assert block.add(x) == block.add(x.view(2, 5)) == (0, 0, 40)
    assert block.add(torch.ones(1)).start == ALIGNMENT


# ── parts of larger storages ────────────────────────────────────────────────────────────────────


@given(st.integers(0, 8), st.integers(0, 8), st.sampled_from(["float32", "int8", "complex128"]))
def test_a_part_travels_without_the_rest(start: int, count: int, dtype: str) -> None:
    """Only its bytes are written, and each part is a storage of its own."""
    whole = torch.arange(48).to(DTYPES[dtype]).reshape(16, 3)
    part = whole[start : start + count]
    found = place([part, part, part[:]])
    assert found is not None
    parts = 2 if count else 0  # the same object, and another one
    assert sum(block.size for block in found[0]) <= parts * (part.nbytes + ALIGNMENT)
    one, same, other = received([part, part, part[:]])
    assert torch.equal(one, part)
    assert one.untyped_storage().nbytes() == part.nbytes
    one.zero_()
    assert not same.any()
    assert torch.equal(other, part)


def test_parts_with_gaps_travel_with_their_storage() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    (found,) = received([x[:, 1:3]])
    assert torch.equal(found, x[:, 1:3])
    assert found.untyped_storage().nbytes() == x.nbytes


def test_a_part_of_a_freed_storage_is_left_to_torch() -> None:
    part = torch.ones(10)[2:5]
    part.untyped_storage().resize_(16)
    assert place([part]) is None


def test_equal_contents_have_equal_bytes() -> None:
    """The same extents of the same storages, unchanged: other objects, but the same memory."""
    x, y = torch.zeros(20), torch.zeros(20)

    def content(*tensors: Tensor) -> Any:
        found = place(tensors)
        assert found is not None
        return (*found[0][0].contents,)

    assert content(x, x[2:5]) == content(x.view(4, 5), x[2:5])
    others = [content(x), content(y), content(x, y), content(x[2:5]), content(x[3:6])]
    assert len({content(x, x[2:5]), *others}) == 6
    before = content(x)
    x.add_(1)
    assert content(x) != before
    with torch.inference_mode():  # no changes are counted
        z = torch.zeros(3)
        assert content(z) == content(z.view(3, 1))


def test_what_many_receivers_get_is_cut_out_once_for_torch() -> None:
    """A part of a larger storage; anything else is the tensor."""
    part = torch.zeros(2, LARGE)[0]
    (alike,) = share([part])
    assert compact(alike) is compact(alike)
    assert compact(alike).untyped_storage().nbytes() == part.nbytes
    assert compact(part) is not compact(part)
    whole = torch.zeros(3)
    assert compact(whole) is whole
