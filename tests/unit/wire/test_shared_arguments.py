"""Arguments that are encoded once for many members: equal to what each would get alone."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from aiorpc_torch._wire.messages import (
    CallHead,
    EncodedCall,
    HeadCache,
    encode_call,
    encode_calls,
)
from aiorpc_torch._wire.plain import dump
from aiorpc_torch._wire.shared_arguments import EachValue, MemberArguments, encode_for_members
from aiorpc_torch._wire.tensor_table import TensorTable
from aiorpc_torch._wire.tensors import INLINE_BYTES
from aiorpc_torch._wire.wire_targets import NamedTarget
from tests.support.received_calls import load_calls


def decoded(row: MemberArguments) -> Any:
    """What a member gets."""
    tensors = TensorTable()
    call = call_of(row)
    (group,) = load_calls(dump(encode_calls((call,), 0.0, tensors)))
    (arguments,) = CallHead(group.head).rows(group, iter(tensors))
    return arguments


def call_of(row: MemberArguments) -> EncodedCall:
    return row.call(HeadCache(), 7, NamedTarget("method", (1, 2), "m"), None)


class Counted:
    """Counts how often it is pickled."""

    def __init__(self, value: Any = None) -> None:
        self.value, self.pickled = value, 0

    def __reduce__(self) -> Any:
        self.pickled += 1
        return Counted, (self.value,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


PLAIN = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.binary(max_size=5))
ANY = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@st.composite
def calls(draw: st.DrawFn) -> Any:
    """A number of members, and arguments of which some are `each`."""
    count = draw(st.integers(1, 4))
    own = st.lists(ANY, min_size=count, max_size=count).map(EachValue)
    values = draw(st.lists(st.one_of(ANY, own), max_size=4))
    named = draw(st.dictionaries(st.sampled_from("xyz"), st.one_of(ANY, own), max_size=2))
    return count, (tuple(values), named)


def of_member(value: Any, index: int) -> Any:
    return value.values[index] if isinstance(value, EachValue) else value


@given(calls())
def test_each_member_gets_its_arguments(call: Any) -> None:
    """Whatever is shared and whatever is its own, each gets what a call of its own would bring."""
    count, (args, kwargs) = call
    rows = encode_for_members((args, kwargs), count)
    assert len(rows) == count
    for index, row in enumerate(rows):
        expected = tuple(of_member(each, index) for each in args)
        named = {name: of_member(each, index) for name, each in kwargs.items()}
        assert decoded(row) == (expected, named)


@pytest.mark.parametrize("count", [1, 5])
def test_pickled_once(count: int) -> None:
    """Shared arguments are pickled once for all, each of the others once."""
    shared, own = Counted("shared"), [Counted(n) for n in range(count)]
    rows = encode_for_members(((shared, EachValue(own)), {"again": shared}), count)
    for index, row in enumerate(rows):
        (first, second), named = decoded(row)
        assert first is named["again"]
        assert (first, second) == (shared, own[index])
    assert shared.pickled == 1
    assert [each.pickled for each in own] == [1] * count


def test_tensors_are_shared() -> None:
    """Large ones are in the calls without a copy, small ones as the same bytes."""
    large, small = torch.randn(INLINE_BYTES), torch.randn(4)
    rows = encode_for_members(((large, small), {}), 3)
    assert all(row.cells[0] is rows[0].cells[0] for row in rows)
    assert all(row.cells[1] is rows[0].cells[1] for row in rows)
    assert rows[0].cells[0].data_ptr() == large.data_ptr()
    assert all(call_of(row).is_large for row in rows)
    nested = encode_for_members((({"weight": large},), {}), 3)
    packed = [row.packed for row in nested if row.packed is not None]
    assert [each.tensors[0].data_ptr() for each in packed] == [large.data_ptr()] * 3


def test_one_view_is_copied_once() -> None:
    """A part of a larger storage is cut out once for all."""
    view = torch.zeros(2, INLINE_BYTES)[0]
    rows = encode_for_members(((view,), {}), 3)
    assert len({row.cells[0].data_ptr() for row in rows}) == 1


def test_one_tensor_twice_arrives_as_one() -> None:
    """As in a lone call."""
    weight = torch.ones(3)
    (row, _) = encode_for_members(((weight, weight), {}), 2)
    (one, other), _ = decoded(row)
    assert one is other


@given(st.integers(0, 5), st.booleans())
def test_rows_of_a_tensor(count: int, large: bool) -> None:
    """`each` of a tensor gives its rows."""
    batch = torch.randn(count, INLINE_BYTES if large else 2)
    rows = encode_for_members(((EachValue(batch),), {}), count)
    assert len(rows) == count
    for index, row in enumerate(rows):
        ((value,), _) = decoded(row)
        assert isinstance(value, Tensor)
        assert torch.equal(value, batch[index])


@pytest.mark.parametrize("values", ["abc", b"abc", bytearray(3), {"a": 1}, {1, 2}, {}.keys()])
def test_each_refuses(values: Any) -> None:
    """What iterates, but surely not as meant."""
    with pytest.raises(TypeError, match=r"each\(\) takes a sequence of values, got a "):
        EachValue(values)


@pytest.mark.parametrize("values", [3, None, torch.tensor(1.0)])
def test_each_of_what_does_not_iterate(values: Any) -> None:
    with pytest.raises(TypeError, match=r"each\(\) takes a sequence of values"):
        EachValue(values)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_each_of_another_length(count: int) -> None:
    """It names both numbers."""
    with pytest.raises(ValueError, match=f"3 values for {count} members"):
        encode_for_members(((), {"x": EachValue(iter("abc"))}), count)


@pytest.mark.parametrize("around", [lambda each: [each], lambda each: {"x": each}])
def test_each_inside_another_argument(around: Any) -> None:
    with pytest.raises(TypeError, match="direct argument"):
        encode_for_members(((around(EachValue([1, 2])),), {}), 2)


LARGE = torch.zeros(INLINE_BYTES)
BYTES = b"x" * (INLINE_BYTES - 40)


@pytest.mark.promise("transport.large")
@pytest.mark.parametrize(
    "work",
    [
        ((), {}),
        ((1, torch.ones(3)), {"text": "x" * 100}),
        ((LARGE,), {}),
        ((), {"named": LARGE}),
        (([LARGE],), {}),
        ((BYTES,), {}),
        ((b"xxx", BYTES), {}),
        (([BYTES],), {}),
        (([1],), {"key": {2: 3}}),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_call_is_as_large_as_alone(work: Any, count: int) -> None:
    """A member's call has the head, the size and the way of one that is encoded for it alone."""
    target, own = NamedTarget("method", (1, 2), "m"), HeadCache()
    alone = encode_call(own, 7, target, False, work, 4.5, (("me", 1),))
    for row in encode_for_members(work, count):
        call = row.call(own, 7, target, 4.5, (("me", 1),))
        assert (call.number, call.due, call.batches) == (7, 4.5, (("me", 1),))
        assert call.head is alone.head
        assert call.is_large == alone.is_large
        assert abs(call.size - alone.size) < 100  # another memo of the pickle, for one


def test_a_slot_alone_cannot_be_read() -> None:
    """Nothing but its message fills it."""
    from aiorpc_torch._wire import pickling

    for part in (pickling._value_slot, pickling._fill_slots):
        with pytest.raises(pickle.UnpicklingError):
            part(*[0] * part.__code__.co_argcount)
