"""Frames of one call and one result: every value arrives as a frame of groups would bring it."""

import asyncio
import contextlib
import math
import struct
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from aiorpc_torch import RRef, call, remote
from aiorpc_torch._protocol import lone
from aiorpc_torch._protocol.frames import CALL, HEADER, RESULT, FrameReader, ProtocolError
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
from aiorpc_torch._server import session

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


@given(st.binary(max_size=60))
def test_malformed_frames(data: bytes) -> None:
    """They are decoded, or rejected with one of these errors."""
    for decode in (decode_call, decode_result, decode_method, lambda data: decode_value(data, 0)):
        with contextlib.suppress(ProtocolError, struct.error, ValueError, IndexError):
            decode(data)


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


class Echo:
    async def on_loop(self, *args: Any) -> Any:
        return args[0] if args else None

    def plain(self, *args: Any) -> Any:
        return args[0] if args else None


@pytest.mark.parametrize("name", ["on_loop", "plain"])
async def test_values_there_and_back(world: Any, name: str) -> None:
    """Whatever frame a value takes, it arrives as it was."""
    echo = getattr(remote(RRef(Echo())), name)
    assert await echo() is None
    for value in (None, True, 7, -1.5, "ä\ud800", b"\0", [1], 2**70, "x" * 5000):
        assert same(await echo(value), value)
    assert same(await echo(torch.arange(4).reshape(2, 2).T), torch.arange(4).reshape(2, 2).T)


async def test_lone_calls_travel_in_frames_of_their_own(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone call of a connection that is open, and its result."""
    seen: list[int] = []
    take = FrameReader.next

    def watched(reader: FrameReader) -> Any:
        found = take(reader)
        if found is not None:
            seen.append(found[0])
        return found

    monkeypatch.setattr(FrameReader, "next", watched)
    echo = remote(RRef(Echo()))
    await echo.on_loop(1)
    seen.clear()
    await echo.on_loop(torch.ones(4))
    assert seen == [CALL, RESULT]
    assert HEADER.size == len(lone.encode_result(0, None) or b"") - 9


def test_a_tensor_without_memory_is_not_read() -> None:
    """Its storage was freed: bytes of other objects would be sent in its place."""
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    assert encode_value(tensor) is None


async def test_a_result_that_cannot_be_encoded(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports a lack of memory as a RuntimeError: its caller is answered all the same."""
    echo = remote(RRef(Echo()))
    await echo.on_loop(1)

    def fail(*_: Any) -> bytes:
        monkeypatch.undo()
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(session, "encode_result", fail)
    async with asyncio.timeout(5):
        assert await echo.on_loop(2) == 2


class Unnamed:
    def __repr__(self) -> str:
        raise ValueError("no repr")

    async def slow(self) -> int:
        await asyncio.sleep(0.05)
        return 7


async def answer(_: Unnamed) -> int:
    return 8


async def test_an_object_whose_repr_fails(world: Any) -> None:
    """A function that is called with it runs nobody's `__repr__`, and breaks no other call."""
    rref = RRef(Unnamed())
    slow = asyncio.ensure_future(remote(rref).slow())
    assert await call(rref, answer) == 8
    assert await slow == 7
