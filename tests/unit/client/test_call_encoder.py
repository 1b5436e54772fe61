"""The encoding of calls: which of them a lone frame takes, and what it says of the others."""

import contextvars
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from aiorpc_torch._client.call_encoder import CallEncoder, slot_key
from aiorpc_torch._protocol.ancestry import BatchScope, enter_scopes
from aiorpc_torch._protocol.columns import PACKED, PLAIN
from aiorpc_torch._protocol.frames import HEADER
from aiorpc_torch._protocol.lone import decode_call, decode_method
from aiorpc_torch._protocol.payloads import UNKNOWN_OBJECT
from aiorpc_torch._protocol.shared_arguments import encode_for_members
from aiorpc_torch._protocol.targets import BoundTarget, FunctionTarget, MethodTarget, Target
from aiorpc_torch._protocol.wire_targets import METHOD as METHOD_KIND, NamedTarget

METHOD = MethodTarget((2, 7), "method")
NAMED_METHOD = NamedTarget(METHOD_KIND, (2, 7), "method")
IDS = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2)
NUMBERS = st.integers(0, 2**64 - 1)


def function() -> None:
    """A function that is pickled by reference."""


@pytest.fixture
def encoder() -> CallEncoder:
    return CallEncoder("me", "peer")


@given(NUMBERS, IDS, st.text(min_size=1, max_size=50), st.none() | st.integers(-9, 9))
def test_a_lone_call(number: int, on: Any, name: str, value: int | None) -> None:
    """Its frame decodes to what the frame of other calls would have held."""
    args = () if value is None else (value,)
    encoder, target = CallEncoder("me", "peer"), MethodTarget(on, name)
    found = encoder.lone(number, target, args)
    assert found is not None
    key, frame = found
    assert key == encoder.call(number, target, False, (args, {}), None).header[0]
    assert key == NamedTarget(METHOD_KIND, on, name)
    decoded, encoded, arguments = decode_call(frame[HEADER.size :])
    assert (decoded, decode_method(encoded), arguments) == (number, target, args)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (FunctionTarget(function), ()),
        (BoundTarget((2, 7), function), ()),
        (METHOD, (1, 2)),
        (METHOD, ([],)),
        (METHOD, ("x" * 1_000_000,)),
        (MethodTarget((2, 7), "x" * 1_000_000), ()),
    ],
)
def test_calls_that_no_lone_frame_takes(
    encoder: CallEncoder, target: Target, args: tuple[Any, ...]
) -> None:
    """They are encoded with others."""
    assert encoder.lone(0, target, args) is None
    assert encoder.call(0, target, False, (args, {}), None).number == 0


def test_a_call_names_its_ancestor_batches(encoder: CallEncoder) -> None:
    """With the name of this worker; a lone frame has no place for them."""

    def encode() -> None:
        enter_scopes((BatchScope(frozenset({("", 5)}), lambda: True),))
        assert encoder.lone(0, METHOD, (1,)) is None
        (member,) = encode_for_members(((1,), {}), 1)
        one = encoder.call(0, METHOD, False, ((1,), {}), None)
        assert encoder.member_call(0, encoder.member_target(METHOD, member), member, None) == one
        assert one.header == (NAMED_METHOD, False, (), (PLAIN,), ("me", 5))

    contextvars.copy_context().run(encode)


def test_arguments_pickled_as_a_whole(encoder: CallEncoder) -> None:
    """A list is no cell; it is pickled with all other arguments."""
    call = encoder.call(3, METHOD, True, (([1], 2), {"key": 3}), 4.5)
    assert (call.number, call.due) == (3, 4.5)
    assert call.header == (NAMED_METHOD, True, None, (PACKED,))


@pytest.mark.parametrize(
    ("target", "key"),
    [
        (METHOD, (2, 7)),
        (FunctionTarget(function), f"{__name__}.function"),
        (FunctionTarget(torch.nn.Identity()), UNKNOWN_OBJECT),
    ],
)
def test_the_key_of_a_slot(target: Target, key: Any) -> None:
    """The object or the function; a callable without a name holds back every later call."""
    assert slot_key(target) == key
