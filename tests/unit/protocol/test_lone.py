"""Frames of one call and one result: every value arrives as a frame of groups would bring it."""

import contextlib
import math
import struct
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from aiorpc_torch._protocol.frames import CALL, RESULT, FrameReader, ProtocolError
from aiorpc_torch._protocol.lone import (
    DTYPES,
    MAX_TEXT,
    decode_call,
    decode_method,
    decode_result,
    decode_value,
    encode_call,
    encode_method,
    encode_result,
    encode_value,
)

numbers = st.integers(0, 2**63)
ids = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
names = st.from_regex(r"[a-zA-Zäß]\w{0,20}", fullmatch=True)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 100, shape).to(dtype)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor


values = st.one_of(
    tensors(),
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters(), max_size=50),
    st.binary(max_size=50),
)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        is_alike = found.dtype == expected.dtype and found.shape == expected.shape
        return is_alike and torch.equal(found, expected)
    if isinstance(expected, float) and math.isnan(expected):
        return math.isnan(found)
    return type(found) is type(expected) and bool(found == expected)


def framed(data: bytes) -> tuple[int, bytes]:
    """Return what a reader that gets these bytes in one read takes for a frame."""
    reader = FrameReader()
    reader.buffer()[: len(data)] = data
    reader.received(len(data))
    found = reader.next()
    assert found is not None
    assert not reader.unread
    return found


@given(numbers, ids, names, st.lists(values, max_size=1))
def test_a_call_arrives_as_it_was(
    number: int, rref_id: tuple[int, int], name: str, args: list[Any]
) -> None:
    """Its number, its target and its arguments, unless it takes a frame of groups."""
    encoded = encode_method(rref_id, name)
    assert encoded is not None
    data = encode_call(number, encoded, tuple(args))
    if data is None:
        assert type(args[0]) is int
        assert not -(2**63) <= args[0] < 2**63
        return
    kind, content = framed(data)
    assert kind == CALL
    found, target, arrived = decode_call(content)
    assert (found, decode_method(target)) == (number, (rref_id, name))
    assert len(arrived) == len(args)
    assert all(map(same, arrived, args))


@given(numbers, values)
def test_a_result_arrives_as_it_was(number: int, value: Any) -> None:
    """Unless it takes a frame of groups."""
    data = encode_result(number, value)
    if data is not None:
        kind, content = framed(data)
        assert kind == RESULT
        found, arrived = decode_result(content)
        assert found == number
        assert same(arrived, value)


@pytest.mark.parametrize(
    "value",
    [
        [1],
        (1,),
        {},
        1j,
        2**63,
        -(2**63) - 1,
        "x" * MAX_TEXT,
        b"x" * (MAX_TEXT + 1),
        torch.ones(1, requires_grad=True),
        torch.ones(1 << 16),
        torch.ones([1] * 9),
        torch.nn.Parameter(torch.ones(1)),
        torch.ones(2, 2).to_sparse(),
        type("Sub", (int,), {})(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_need_a_frame_of_groups(value: Any) -> None:
    """Large values, and values that are neither plain tensors nor plain values."""
    assert encode_value(value) is None


def test_two_arguments_take_a_frame_of_groups() -> None:
    """One tensor that is passed twice arrives as one."""
    tensor = torch.ones(1)
    assert encode_call(1, b"target", (tensor, tensor)) is None
    assert encode_method((1, 2), "m" * MAX_TEXT) is None


@pytest.mark.parametrize(
    "value", [-(2**63), 2**63 - 1, b"x" * MAX_TEXT, "x" * (MAX_TEXT // 4), "ä" * (MAX_TEXT // 4)]
)
def test_values_at_the_bounds(value: Any) -> None:
    """The largest values of each kind travel without pickling."""
    data = encode_value(value)
    assert data is not None
    assert same(decode_value(data, 0), value)


def test_one_beyond_the_bounds() -> None:
    """A longer str takes a frame of groups."""
    assert encode_value("x" * (MAX_TEXT // 4 + 1)) is None


def test_a_result_with_a_lone_surrogate() -> None:
    """A str that UTF-8 does not allow travels; a value without a code is left to `messages`."""
    data = encode_result(7, "\ud800")
    assert data is not None
    assert decode_result(framed(data)[1]) == (7, "\ud800")
    assert encode_result(7, object()) is None


def test_the_longest_target() -> None:
    """A target of `MAX_TEXT` bytes travels; a longer one is rejected with its length."""
    name = "m" * (MAX_TEXT - 16)  # two numbers of an RRef id come first
    encoded = encode_method((1, 2), name)
    assert encoded is not None
    data = encode_call(1, encoded, ())
    assert data is not None
    number, target, args = decode_call(framed(data)[1])
    assert (number, decode_method(target), args) == (1, ((1, 2), name), ())
    assert encode_method((1, 2), name + "m") is None
    with pytest.raises(ProtocolError, match=f"{MAX_TEXT + 1} bytes"):
        decode_call(struct.pack("<QH", 1, MAX_TEXT + 1) + bytes(MAX_TEXT + 1))


@pytest.mark.parametrize("code", [len(DTYPES), 63, 71, 255])
def test_unknown_codes_are_named(code: int) -> None:
    """Neither a dtype nor a kind of value: the error tells which code came."""
    with pytest.raises(ProtocolError, match=f": {code}$"):
        decode_value(bytes([code]) + bytes(20), 0)


@given(st.binary(max_size=60))
def test_malformed_frames(data: bytes) -> None:
    """They are decoded, or rejected with one of these errors."""
    for decode in (decode_call, decode_result, decode_method, lambda data: decode_value(data, 0)):
        with contextlib.suppress(ProtocolError, struct.error, ValueError, IndexError):
            decode(data)


@pytest.mark.promise("transport.copied")
@given(tensors())
def test_a_sent_tensor_is_a_copy(tensor: Tensor) -> None:
    """The bytes do not change with the tensor, nor two copies with each other."""
    data = encode_value(tensor)
    assert data is not None
    before = tensor.clone()
    tensor.zero_()
    first, second = decode_value(data, 0), decode_value(data, 0)
    first.fill_(1)
    assert same(second, before)


def test_a_tensor_without_memory_is_not_read() -> None:
    """Its storage was freed: bytes of other objects would be sent in its place."""
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    assert encode_value(tensor) is None
