"""The encoding of calls: what their groups say, and which of them share a head."""

import contextvars
import itertools
import pickle
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from aiorpc_torch._client.call_encoder import CallEncoder, slot_key
from aiorpc_torch._wire.ancestry import BatchScope, enter_scopes
from aiorpc_torch._wire.columns import PACKED, PLAIN
from aiorpc_torch._wire.messages import CallHead, EncodedHead, encode_calls
from aiorpc_torch._wire.plain import dump
from aiorpc_torch._wire.shared_arguments import encode_for_members
from aiorpc_torch._wire.slots import UNKNOWN_OBJECT
from aiorpc_torch._wire.targets import BoundTarget, FunctionTarget, MethodTarget, Target
from aiorpc_torch._wire.tensor_table import TensorTable
from aiorpc_torch._wire.wire_targets import METHOD as METHOD_KIND, NamedTarget
from tests.support.received_calls import load_calls

METHOD = MethodTarget((2, 7), "method")
NAMED_METHOD = NamedTarget(METHOD_KIND, (2, 7), "method")
IDS = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2)
NUMBERS = st.integers(0, 2**64 - 1)
NEXT = itertools.count()


def function() -> None:
    """A function that is pickled by reference."""


@pytest.fixture
def encoder() -> CallEncoder:
    return CallEncoder("me", "peer")


@given(NUMBERS, IDS, st.text(min_size=1, max_size=50), st.none() | st.integers(-9, 9))
def test_a_call(number: int, on: Any, name: str, value: int | None) -> None:
    """Its group has the target and the arguments, whatever was encoded before it."""
    args = () if value is None else (value,)
    encoder, target = CallEncoder("me", "peer"), MethodTarget(on, name)
    for _ in range(2):
        call = encoder.call(number, target, False, (args, {}), None)
        (group,) = load_calls(dump(encode_calls((call,), 0.0, TensorTable())))
        head = CallHead(group.head)
        assert (group.numbers, head.target) == ([number], NamedTarget(METHOD_KIND, on, name))
        assert (head.stream, head.kinds) == (False, [PLAIN] * len(args))
        assert head.rows(group, iter(())) == [(args, {})]


def test_calls_of_a_method_share_their_head(encoder: CallEncoder) -> None:
    """As long as the kinds of their arguments, and what they return, are the same."""

    def head(target: Target, *args: Any, stream: bool = False, **kwargs: Any) -> EncodedHead:
        return encoder.call(next(NEXT), target, stream, (args, kwargs), None).head

    first = head(METHOD, 1)
    assert head(METHOD, "two") is first
    others = [
        head(METHOD),
        head(METHOD, 1, 2),
        head(METHOD, a=1),
        head(METHOD, [1]),
        head(METHOD, torch.ones(2)),
        head(METHOD, torch.ones(3)),
        head(METHOD, 1, stream=True),
        head(MethodTarget((2, 7), "other"), 1),
        head(MethodTarget((2, 8), "method"), 1),
        head(FunctionTarget(function), 1),
        head(BoundTarget((2, 7), function), 1),
    ]
    assert len({first.data, *(each.data for each in others)}) == 1 + len(others)
    assert head(METHOD, 3) is first


def test_the_head_of_a_members_call(encoder: CallEncoder) -> None:
    """That of a call of its own."""
    for work in (((1,), {}), (([1],), {}), ((torch.zeros(2),), {"key": "x"})):
        (member,) = encode_for_members(work, 1)
        target = encoder.member_target(METHOD, member)
        call = encoder.member_call(0, target, member, None)
        assert call.head is encoder.call(0, METHOD, False, work, None).head


@pytest.mark.promise("transport.apart")
@pytest.mark.parametrize("value", [(n for n in "ab"), [threading.Lock()]])
def test_arguments_that_cannot_be_sent(encoder: CallEncoder, value: Any) -> None:
    """The error names the method and the worker; the next call is encoded."""
    with pytest.raises((TypeError, pickle.PicklingError)) as raised:
        encoder.call(0, METHOD, False, ((value,), {}), None)
    assert "(while pickling the arguments of method for worker 'peer')" in raised.value.__notes__
    assert encoder.call(0, METHOD, False, ((1,), {}), None).cells == (1,)


def test_a_call_names_its_ancestor_batches(encoder: CallEncoder) -> None:
    """With the name of this worker; its head does not, and is that of other calls."""
    other = encoder.call(0, METHOD, False, ((1,), {}), None)
    assert other.batches == ()

    def encode() -> None:
        enter_scopes(frozenset([BatchScope(frozenset({("", 5)}), lambda: True)]))
        (member,) = encode_for_members(((1,), {}), 1)
        one = encoder.call(0, METHOD, False, ((1,), {}), None)
        two = encoder.member_call(0, encoder.member_target(METHOD, member), member, None)
        for call in (one, two):
            assert call.batches == (("me", 5),)
            assert call.head is other.head

    contextvars.copy_context().run(encode)


def test_arguments_pickled_as_a_whole(encoder: CallEncoder) -> None:
    """A list is no cell; it is pickled with all other arguments."""
    call = encoder.call(3, METHOD, True, (([1], 2), {"key": 3}), 4.5)
    assert (call.number, call.due) == (3, 4.5)
    head = CallHead(call.head.data)
    assert (head.target, head.stream, head.names) == (NAMED_METHOD, True, None)
    assert call.head.kinds == (PACKED,)


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
