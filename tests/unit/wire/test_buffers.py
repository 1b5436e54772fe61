"""Memory of arrays and long bytes outside a pickle: nothing is copied but bytes, once."""

import array
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from aiorpc_torch._wire.buffers import (
    LONG_PART,
    SHORT_BUFFER,
    SMALL_BUFFER,
    PickleReader,
    memory_of,
    tensor_of,
)
from aiorpc_torch._wire.pickling import (
    LongPickle,
    SharedPickle,
    ValueSlot,
    pack,
    unpack,
    unpack_or_defer,
)
from aiorpc_torch._wire.tensors import INLINE_BYTES
from tests.support.equal_values import are_equal

EDGES = (0, SMALL_BUFFER, SHORT_BUFFER, INLINE_BYTES, LONG_PART, LONG_PART * 3)
sizes = st.sampled_from(EDGES).flatmap(
    lambda edge: st.sampled_from([edge, max(0, edge - 1), edge + 1])
)


def made(kind: str, size: int) -> Any:
    """Return an object of some kind with so many bytes, which differ."""
    content = np.arange(size, dtype=np.uint8)
    if kind == "read-only":
        content.flags.writeable = False
        return content
    if kind == "fortran":
        return np.asfortranarray(content[: size // 3 * 3].reshape(3, -1))
    if kind == "structured":
        return content[: size // 12 * 12].view([("a", "<f4"), ("b", "<f8")])
    if kind == "strided":
        return np.repeat(content, 2)[::2]
    if kind == "masked":
        return np.ma.masked_less(content, 3)
    if kind == "objects":
        return np.array([None, size, "x"], dtype=object)
    made_of = {
        "array": lambda: content,
        "bytes": content.tobytes,
        "bytearray": lambda: bytearray(content),
        "memoryview": lambda: memoryview(content.tobytes()),
        "writable memoryview": lambda: memoryview(bytearray(content)),
        "array.array": lambda: array.array("H", content[: size // 2 * 2].tobytes()),
        "text": lambda: "x" * size,
        "tensor": lambda: torch.from_numpy(content.copy()),
        "buffer": lambda: pickle.PickleBuffer(content.tobytes()),
    }
    return made_of[kind]()


KINDS = (
    *("array", "read-only", "fortran", "structured", "strided", "masked", "objects", "bytes"),
    *("bytearray", "memoryview", "writable memoryview", "array.array", "text", "tensor"),
)
leaves = st.builds(made, st.sampled_from(KINDS), sizes) | st.integers() | st.none()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


def arrived(packed: Any) -> Any:
    """Return the value of a `PickledValue` whose tensors were copied to another place."""
    data, _, *outside = packed.on_the_wire()
    return unpack(data, [each.clone() for each in packed.tensors], *outside)


@given(values)
@settings(deadline=None)
def test_values_arrive_as_they_are(value: Any) -> None:
    """Values, classes and flags, with the copy of each tensor in the place of its memory."""
    packed = pack(value)
    assert len(packed.data) <= INLINE_BYTES
    assert are_equal(arrived(packed), value)


@given(values, values)
@settings(deadline=None)
def test_a_pickle_for_many_arrives_at_each(shared: Any, own: Any) -> None:
    """Buffers of what all receivers get, and of what each gets, do not mix."""
    pickled = SharedPickle((shared, ValueSlot(0), shared))
    for value in (own, 1):
        first, second, third = arrived(pickled.fill([value]))
        assert are_equal((first, second, third), (shared, value, shared))


@pytest.mark.parametrize("kind", ["array", "read-only", "fortran", "bytes", "bytearray"])
def test_nothing_is_copied_to_send(kind: str) -> None:
    """The tensors are the memory itself."""
    value = made(kind, 3 * LONG_PART)
    address = np.frombuffer(value, np.uint8).ctypes.data if kind != "fortran" else value.ctypes.data
    assert address in [each.data_ptr() for each in pack([1, {"x": value}]).tensors]


@pytest.mark.parametrize("kind", ["array", "read-only", "fortran", "structured"])
def test_an_array_lies_in_the_memory_that_has_arrived(kind: str) -> None:
    """Aligned, and as writable as it was."""
    value = made(kind, 3 * LONG_PART)
    packed = pack(value)
    data, _, *outside = packed.on_the_wire()
    found = unpack(data, packed.tensors, *outside)
    assert np.shares_memory(found, value)
    assert found.flags.writeable is value.flags.writeable
    assert type(unpack_or_defer(data, packed.tensors, *outside)) is np.ndarray


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "array.array", "text"])
def test_what_is_copied_when_it_is_loaded_is_loaded_apart(kind: str) -> None:
    """Not on an event loop."""
    value = made(kind, 3 << 20)
    packed = pack({"a": value})
    data, _, *outside = packed.on_the_wire()
    found = unpack_or_defer(data, packed.tensors, *outside)
    assert type(found) is LongPickle
    assert found.load() == {"a": value}


def test_short_buffers_are_one_tensor() -> None:
    """A dict of twenty arrays costs little more than one array."""
    arrays = {number: made("array", SHORT_BUFFER - 10_000 - number) for number in range(20)}
    packed = pack(arrays)
    assert len(packed.tensors) == 1
    found = arrived(packed)
    assert all(each.ctypes.data % 8 == 0 for each in found.values())
    assert are_equal(found, arrays)


@pytest.mark.parametrize("value", [pickle.PickleBuffer(b"x" * (1 << 20)), memoryview(b"ab")[::2]])
def test_other_buffers(value: Any) -> None:
    """A buffer arrives as bytes, and a view with gaps as its elements."""
    found = arrived(pack([value]))[0]
    assert bytes(found) == bytes(value)


def test_memory_is_kept() -> None:
    """A tensor keeps the memory that it is made of, and memory its tensor."""
    text = bytearray(b"abc" * 100_000)
    tensor = tensor_of(text)
    with pytest.raises(BufferError):
        text.append(1)
    view = memory_of(tensor)
    del tensor, text
    assert bytes(view[:3]) == b"abc"
    view[0] = ord("x")
    assert bytes(view[:3]) == b"xbc"


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(1, dtype=torch.int8)],
)
def test_only_bytes_are_memory(tensor: Any) -> None:
    """A peer may send any tensor in the place of a buffer."""
    with pytest.raises(ValueError, match="a buffer is a tensor of bytes"):
        memory_of(tensor)


@pytest.mark.parametrize(
    "outside", [(1, ()), (0, (1 << 20,)), (9, ()), (0, (5, 5, 1 << 20)), (0, (-1,))]
)
def test_outside_that_is_not_there(outside: Any) -> None:
    """It fails the value alone."""
    packed = pack(made("array", 1 << 19))
    found = unpack(packed.data, packed.tensors, outside)
    assert type(found).__name__ in ("RemoteFailure", "ndarray")
    assert type(unpack(b"", [], outside)).__name__ == "RemoteFailure"


@given(
    st.lists(st.binary(min_size=1, max_size=9), max_size=5),
    st.lists(st.integers(0, 12)),
    st.booleans(),
)
def test_parts_are_read_as_one_file(parts: list[bytes], steps: list[int], into: bool) -> None:
    """Whatever the steps."""
    reader = PickleReader([memoryview(bytearray(each)) for each in parts])
    whole = b"".join(parts)
    for step in steps:
        expected, whole = whole[:step], whole[step:]
        if into:
            target = bytearray(step)
            assert reader.readinto(target) == len(expected)
            assert bytes(target[: len(expected)]) == expected
        else:
            assert reader.read(step) == expected
