"""Messages as bytes: what is read is what was written, and nothing more than its bytes allow."""

import contextlib
import tracemalloc
from typing import Any, NamedTuple

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._wire.columns import PLAIN, direct_cell
from aiorpc_torch._wire.messages import (
    Group,
    _read_head,
    _read_payload,
    read_groups,
    read_reply,
)
from aiorpc_torch._wire.plain import dump, is_wire_text, reader, wire_text
from tests.support.malformed import BYTES

read = reader(Any)
READERS = [read_groups, _read_head, _read_payload, read_reply]

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
)


class Pair(NamedTuple):
    one: int
    other: tuple[str, ...]


@given(st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=4), max_leaves=12))
def test_what_is_read_is_what_was_written(value: Any) -> None:
    found = read(dump(value))
    assert found == value
    assert type(found) is type(value)


def test_a_reader_makes_the_tuples_that_it_declares() -> None:
    pair = Pair(1, ("a", "b"))
    found = reader(Pair)(dump(pair))
    assert (type(found), found) == (Pair, pair)
    assert read(dump(pair)) == [1, ["a", "b"]]


@pytest.mark.parametrize("value", [(1,), (1, ("a",), 2), (True, ()), (1, (2,)), 5, None])
def test_other_types_than_declared_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="Expected"):
        reader(Pair)(dump(value))


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 1j, "\udc80", int, {1}.__iter__()])
def test_what_no_message_can_hold(value: Any) -> None:
    """Of these a cell is no plain one, so that it is pickled."""
    with pytest.raises((OverflowError, TypeError, ValueError)):
        dump(value)
    assert direct_cell(value) is None


@given(ATOMS)
def test_a_plain_cell_is_written(value: Any) -> None:
    """Whatever is a plain cell can be written, so no call fails the others of its frame."""
    cell = direct_cell(value)
    assert cell is not None
    assert cell[0] == PLAIN
    assert read(dump(cell[1])) == value


@given(st.text(st.characters(), max_size=20))
def test_text_with_surrogates(text: str) -> None:
    """Is escaped; any other text is left as it is."""
    sent = wire_text(text)
    assert read(dump(sent)) == sent
    assert is_wire_text(sent)
    assert (sent == text) is is_wire_text(text)


@pytest.mark.promise("security.memory")
@pytest.mark.parametrize("load", [read, *READERS])
@pytest.mark.parametrize("what", BYTES)
def test_memory_is_bounded_by_the_length(what: str, load: Any) -> None:
    """Of what only declares its size, and of what is deep: at most 100 bytes for each of theirs."""
    data = BYTES[what]
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError, RecursionError):
            load(data)
        assert tracemalloc.get_traced_memory()[1] < 20_000 + 100 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.promise("security.memory")
@pytest.mark.parametrize("load", READERS)
@given(data=st.binary(max_size=200))
def test_any_bytes(load: Any, data: bytes) -> None:
    """Are a message of the declared types, or are refused."""
    try:
        found = load(data)
    except (ValueError, RecursionError):
        return
    given = read(data)
    groups = given if load is read_groups else given[2] if load is _read_payload else []
    for group in groups:  # one may leave out its last fields
        group += [[], []][len(group) - 3 :]
    assert read(dump(found)) == given


CALLS = [Group(b"head", [1, 2], [[3, 4], b"5"], [None, 0.5], (("me", 1),))]


@pytest.mark.promise("security.memory")
@given(st.data())
def test_any_change_of_one_byte(data: st.DataObject) -> None:
    """Is a message of the declared types, or is refused."""
    sent = bytearray(dump(CALLS))
    sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_groups(bytes(sent))
    except (ValueError, RecursionError):
        return
    for group in found:
        assert type(group) is Group
        assert type(group.head) is bytes
        assert all(type(number) is int and number >= 0 for number in group.numbers)
