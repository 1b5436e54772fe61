"""Calls and results as they travel: whatever is packed together comes out apart, and the same."""

import contextlib
import ctypes
import functools
import io
import itertools
import math
import pickle
import threading
from operator import itemgetter
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor

from aiorpc_torch._wire.columns import (
    ENDED,
    FAILED,
    HELD,
    STREAM_END,
    HeldResult,
    direct_cell,
    encode_cell,
)
from aiorpc_torch._wire.connection_state import FRAME_BYTES
from aiorpc_torch._wire.exceptions import RemoteFailure
from aiorpc_torch._wire.frames import MAX_FRAME
from aiorpc_torch._wire.messages import (
    CALL_OVERHEAD,
    MAX_HEADS,
    CallHead,
    EncodedCall,
    Group,
    HeadCache,
    decode_reply,
    dump_payload,
    encode_call,
    encode_calls,
    encode_reply,
    load_payload,
    numbers_of,
)
from aiorpc_torch._wire.pickling import LongPickle, pack, unpack
from aiorpc_torch._wire.plain import dump
from aiorpc_torch._wire.targets import (
    BoundTarget,
    CreateTarget,
    FunctionTarget,
    MethodTarget,
)
from aiorpc_torch._wire.tensor_table import TensorTable
from aiorpc_torch._wire.tensors import DTYPES as NAMED_DTYPES, INLINE_BYTES
from aiorpc_torch._wire.wire_targets import NamedTarget, decode_target, encode_target
from tests.support.malformed import HEADS
from tests.support.received_calls import load_calls

NOW = 1000.0
numbers = itertools.count()
NOTHING: Any = (), {}
CACHE = HeadCache()
ONE, OTHER = (0, 1), (0, 2)  # RRef ids of two objects

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (0,), (1,), (5,), (2, 3), (3, 0, 2), (2, 1, 4)]


# ── what is sent ────────────────────────────────────────────────────────────────────────────────


def filled(dtype: torch.dtype, shape: tuple[int, ...], first: int) -> Tensor:
    count = math.prod(shape)
    return torch.arange(first, first + count).remainder(100).to(dtype).reshape(shape)


@st.composite
def small_tensors(draw: st.DrawFn) -> Tensor:
    return filled(draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES)), draw(NUMBERS))


@st.composite
def odd_tensors(draw: st.DrawFn) -> Tensor:
    """Views, what autograd knows, and what is large."""
    return draw(
        st.sampled_from(
            [
                filled(torch.float32, (4, 6), 1).t(),
                filled(torch.float32, (4, 6), 1)[:, 1:3],
                filled(torch.int64, (3,), 1).expand(2, 3),
                filled(torch.float64, (3,), 1).requires_grad_(),
                torch.tensor([1 + 2j, 3 - 1j]).conj(),
                torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
                filled(torch.float32, (INLINE_BYTES,), 1),
                filled(torch.uint8, (INLINE_BYTES,), 1),
                filled(torch.uint8, (INLINE_BYTES + 1,), 1),
                filled(torch.bfloat16, (INLINE_BYTES, 2), 1)[:, 0],
                torch.eye(3).to_sparse(),
            ]
        )
    )


NUMBERS = st.integers(0, 1000)
ERRORS = st.builds(ValueError, st.text(max_size=5)) | st.builds(KeyError, st.integers())
ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.integers(0, 2).map(lambda more: "x" * (INLINE_BYTES + more))
    | st.integers(0, 2).map(lambda more: b"x" * (INLINE_BYTES + more))
)
LEAVES = ATOMS | small_tensors() | odd_tensors() | ERRORS
VALUES = LEAVES | st.recursive(
    LEAVES,
    lambda values: (
        st.lists(values, max_size=3)
        | st.tuples(values, values)
        | st.dictionaries(st.text(max_size=3), values, max_size=3)
    ),
    max_leaves=5,
)
WORKS = st.tuples(
    st.lists(VALUES, max_size=3).map(tuple),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, max_size=2),
)
TARGETS = st.sampled_from(
    [
        MethodTarget(ONE, "a"),
        MethodTarget(ONE, "b"),
        MethodTarget(OTHER, "a"),
        FunctionTarget(math.hypot),
    ]
)


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, through and through."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return False
        return one.requires_grad == other.requires_grad and torch.equal(
            one.detach().to_dense(), other.detach().to_dense()
        )
    if isinstance(one, BaseException):
        return same(one.args, other.args)
    if isinstance(one, dict):
        return same([*one.items()], [*other.items()])
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def encoded(
    number: int,
    target: Any,
    stream: bool = False,
    work: Any = NOTHING,
    due: float | None = None,
    cache: HeadCache = CACHE,
) -> EncodedCall:
    """A call of one caller, which remembers its heads."""
    named = target if isinstance(target, NamedTarget) else encode_target(target, target.on)
    return encode_call(cache, number, named, stream, work, due)


def message_of(calls: list[EncodedCall]) -> tuple[list[Group], list[Tensor]]:
    tensors = TensorTable()
    return load_calls(dump(encode_calls(calls, NOW, tensors))), tensors


def across(calls: list[EncodedCall]) -> list[tuple[int, Any, bool, Any]]:
    """Of each call the number, the target, whether it is a stream, and the arguments.

    In the order of their numbers, as the callee starts them.
    """
    groups, tensors = message_of(calls)
    rest = iter(tensors)
    found: list[tuple[int, Any, bool, Any]] = []
    for group in groups:
        head = CallHead(group.head)
        target = decode_target(head.target, head.tensors_of_target(rest))
        rows: list[Any] = [None] * len(group.numbers)
        if isinstance(target, RemoteFailure):
            head.skip(group, rest)
        else:
            rows = head.rows(group, rest)
            rows = [row.load() if type(row) is LongPickle else row for row in rows]
        assert group.numbers == sorted(group.numbers)
        found += [
            (number, target, head.stream, row)
            for number, row in zip(group.numbers, rows, strict=True)
        ]
    assert [*rest] == [], "each tensor belongs to a call"
    return sorted(found, key=itemgetter(0))


def call(*args: Any, **kwargs: Any) -> EncodedCall:
    return encoded(next(numbers), MethodTarget(ONE, "m"), work=(args, kwargs))


def argument(value: Any) -> Any:
    """What arrives as the only argument."""
    ((_, _, _, work),) = across([call(value)])
    assert not isinstance(work, RemoteFailure), work
    return work[0][0]


def result(value: Any) -> Any:
    """What arrives as a result."""
    return returned([(0, *encode_cell(value))])[0]


def returned(results: list[Any]) -> dict[Any, Any]:
    found = decode_reply(*encode_reply(results))
    assert len(dict(found)) == len(found)
    return dict(found)


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("transport.arguments")
@given(st.lists(st.tuples(TARGETS, st.booleans(), WORKS), min_size=1, max_size=8))
def test_calls_arrive_as_they_were_made(calls: list[Any]) -> None:
    """Any arguments for any methods, interleaved: each call with its own, in their order."""
    sent = [
        encoded(5 * number, target, stream, work)
        for number, (target, stream, work) in enumerate(calls)
    ]
    arrived = across(sent)
    assert [number for number, *_ in arrived] == [5 * number for number in range(len(calls))]
    for (target, stream, work), (_, *found) in zip(calls, arrived, strict=True):
        assert found[:2] == [target, stream]
        assert same(work, found[2])


@given(
    st.lists(
        st.tuples(TARGETS, st.integers(-(2**63), 2**64 - 1) | small_tensors()),
        min_size=2,
        max_size=12,
    )
)
def test_calls_of_a_kind_share_a_group(calls: list[Any]) -> None:
    """One group for each method and kind of arguments, and one column for each argument."""
    calls = [each for each in calls if isinstance(each[0], MethodTarget)]
    assume(calls)
    cache = HeadCache()  # a full one is emptied, which begins another group
    groups, tensors = message_of(
        [
            encoded(number, target, work=((value,), {}), cache=cache)
            for number, (target, value) in enumerate(calls)
        ]
    )
    kinds = {
        (target, (value.dtype, value.shape) if isinstance(value, Tensor) else int)
        for target, value in calls
    }
    assert len(groups) == len(kinds)
    assert tensors == []
    assert sorted(numbers_of(groups)) == [*range(len(calls))]


@pytest.mark.promise("order.lone")
@given(st.lists(WORKS, min_size=1, max_size=6), NUMBERS)
def test_a_lone_call_arrives_as_in_a_group(works: list[Any], which: int) -> None:
    """Alone in its frame, or with calls of the same and of other kinds: the same arguments."""
    which %= len(works)
    sent = [call(*args, **kwargs) for args, kwargs in works]
    ((number, target, stream, alone),) = across([sent[which]])
    assert (number, target, stream) == (sent[which].number, MethodTarget(ONE, "m"), False)
    assert same(alone, across(sent)[which][3])
    assert same(alone, works[which])


def test_a_lone_call_is_a_group_of_one() -> None:
    """Its frame has the head, the number and the arguments, and nothing else."""
    sent = call(7)
    ((head, columns),) = [(each.head, each[2:]) for each in message_of([sent])[0]]
    assert head is not sent.head.data
    assert head == sent.head.data
    assert columns == ([[7]], [], (), ())
    assert len(dump(encode_calls([sent], NOW, TensorTable()))) < len(head) + 12


def test_what_two_calls_are_given_arrives_twice() -> None:
    """A large tensor that both pass, or a view of it: what one callee writes is not the other's."""
    large = torch.zeros(INLINE_BYTES)
    sent = [call(large), call(large.view(2, -1)), call([large, large])]  # torch keeps one storage
    one, other, both = (work[0][0] for *_, work in across(sent))
    one.fill_(7)
    assert not other.any()
    assert not both[0].any()
    assert both[0] is both[1]


class Net:
    def forward(self, x: float) -> float:
        return x


FUNCTIONS = [FunctionTarget(math.hypot), FunctionTarget(torch.add), FunctionTarget(same)]
TYPED = [
    BoundTarget(ONE, Net.forward),
    BoundTarget(OTHER, Net.forward),
    BoundTarget(ONE, math.hypot),
]


@pytest.mark.parametrize("target", [*FUNCTIONS, *TYPED])
def test_calls_of_a_function_share_a_group(target: Any) -> None:
    """It is pickled by its name, so once for all."""
    sent = [encoded(number, target, work=((number,), {})) for number in range(3)]
    assert len(message_of(sent)[0]) == 1
    assert [found for _, found, _, _ in across(sent)] == [target] * 3


def test_what_a_function_is_bound_to_is_pickled_as_it_is() -> None:
    """A method of a list takes it along, as it is at each call."""
    grows: list[int] = []
    found = []
    for number in range(3):
        target = FunctionTarget(grows.index)
        sent = encoded(number, target, work=((number,), {}))
        found += [each.function.__self__ for _, each, _, _ in across([sent])]
        grows.append(number)
    assert found == [[], [0], [0, 1]]


def test_to_make_is_not_to_call() -> None:
    """Though both name the same function."""
    targets: list[Any] = [
        FunctionTarget(math.hypot),
        CreateTarget(math.hypot),
        FunctionTarget(math.hypot),
    ]
    sent = [encoded(next(numbers), target) for target in targets]
    assert [type(found) for _, found, _, _ in across(sent)] == [
        FunctionTarget,
        CreateTarget,
        FunctionTarget,
    ]


# ── heads ───────────────────────────────────────────────────────────────────────────────────────


HEAD_FIELDS: dict[str, Any] = {
    "target": NamedTarget("method", ONE, "m"),
    "stream": False,
    "names": (),
    "kinds": ("plain",),
}


def test_a_head_is_made_once() -> None:
    """Calls with the same one share its bytes; any other field makes another."""
    cache = HeadCache()
    first = cache[tuple(HEAD_FIELDS.values())]
    assert cache[tuple(HEAD_FIELDS.values())] is first
    others = [
        cache[tuple((HEAD_FIELDS | other).values())]
        for other in (
            {"target": NamedTarget("method", ONE, "n")},
            {"target": NamedTarget("method", OTHER, "m")},
            {"stream": True},
            {"names": ("a",)},
            {"names": None, "kinds": ("packed",)},
            {"kinds": ("tensor",)},
            {"kinds": ((torch.float32, (2,), ()),)},
            {"kinds": ((torch.float32, (2, 1), ()),)},
            {"kinds": ((torch.float32, (2, 1), (1, 2)),)},
            {"kinds": ((torch.int32, (2,), ()),)},
        )
    ]
    assert len({each.data for each in (first, *others)}) == 1 + len(others)


@given(
    TARGETS,
    st.booleans(),
    st.none() | st.lists(st.text(max_size=5), max_size=2).map(tuple),
    st.lists(
        st.sampled_from(["plain", "tensor", "packed"])
        | st.tuples(
            st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.sampled_from([(), (1, 2)])
        ),
        max_size=4,
    ).map(tuple),
)
def test_a_head_says_what_it_is(target: Any, stream: bool, names: Any, kinds: Any) -> None:
    """What is read from its bytes is what it was made of, if it can be a call's."""
    data = HeadCache()[encode_target(target, target.on), stream, names, kinds].data
    is_wrong = len(names or ()) > len(kinds) or ("packed" in kinds) is not (names is None)
    if is_wrong or (names is None and len(kinds) != 1):
        with pytest.raises(ValueError, match="malformed head of calls"):
            CallHead(data)
        return
    head = CallHead(data)
    assert (decode_target(head.target, ()), head.target_tensors) == (target, 0)
    assert (head.stream, head.kinds) == (stream, [*kinds])
    assert head.names == (None if names is None else [*names])


def test_heads_that_are_not_remembered() -> None:
    """What is pickled may differ from call to call; so may an RRef that only torch can resolve."""
    cache = HeadCache()
    partial = FunctionTarget(functools.partial(max, 1))
    for target in (encode_target(partial, None), NamedTarget("method", b"a fork", "m")):
        one, other = (cache[target, False, (), ()] for _ in range(2))
        assert one is not other
        assert one.data == other.data
    assert not cache


def test_the_heads_that_are_remembered_are_few() -> None:
    """Beyond a bound they are made anew, and stay the same."""
    cache, fields = HeadCache(), {**HEAD_FIELDS}
    first = cache[tuple(fields.values())]
    for number in range(MAX_HEADS):
        other = {"target": NamedTarget("method", (0, number), "other")}
        assert cache[tuple((fields | other).values())]
        assert len(cache) <= MAX_HEADS
    again = cache[tuple(fields.values())]
    assert again is not first
    assert again.data == first.data


@pytest.mark.promise("security.memory")
@pytest.mark.parametrize("what", HEADS)
def test_what_is_no_head_is_refused(what: str) -> None:
    """A ValueError says so."""
    with pytest.raises(ValueError):  # noqa: PT011
        CallHead(HEADS[what])


@pytest.mark.promise("security.memory")
@given(st.data())
def test_any_change_of_a_head(data: st.DataObject) -> None:
    """Is a head, or is refused."""
    fields = {**HEAD_FIELDS, "names": ("a",), "kinds": ("plain", (torch.float32, (2, 3), (1, 2)))}
    sent = bytearray(HeadCache()[tuple(fields.values())].data)
    sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        CallHead(bytes(sent))


# ── frames ──────────────────────────────────────────────────────────────────────────────────────


HEAD = HeadCache()[tuple(HEAD_FIELDS.values())].data
ONE_CALL = [Group(HEAD, [4], [[7]], [], ())]


@pytest.mark.parametrize("context", [-1, 7])
def test_a_payload_says_what_it_is(context: int) -> None:
    """Session, context and the call arrive as they were written."""
    session = "me", 1, 2
    assert load_payload(dump_payload(session, context, ONE_CALL)) == (session, context, ONE_CALL)


@given(
    st.lists(
        st.builds(
            Group,
            st.binary(max_size=20),
            st.lists(NUMBERS, min_size=1, max_size=3, unique=True),
            st.lists(st.binary(max_size=5) | st.lists(st.integers(0, 9)), max_size=2),
            st.just([]),
            st.lists(st.tuples(st.text(max_size=3), st.integers(0, 9)), max_size=2).map(tuple),
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda group: group.head,
    )
)
def test_a_frame_of_calls_says_what_it_is(groups: list[Group]) -> None:
    """Every field arrives as it was written, unless one number is of two calls."""
    numbers = numbers_of(groups)
    assert numbers == [number for group in groups for number in group.numbers]
    if len(set(numbers)) < len(numbers):
        with pytest.raises(ValueError, match="distinct"):
            load_calls(dump(groups))
        return
    assert load_calls(dump(groups)) == groups


def fields(**other: Any) -> list[Any]:
    """A frame of one group, of which some fields are not as they should be."""
    return [[*ONE_CALL[0]._replace(**other)]]


MALFORMED: dict[str, Any] = {
    "no groups": [],
    "a group without fields": [[]],
    "a field too many": [[*ONE_CALL[0], []]],
    "a field too few": [[HEAD, [4]]],
    "a group without calls": fields(numbers=[]),
    "a group without calls behind another": [*fields(), *fields(numbers=[])],
    "one number twice": fields(numbers=[4, 4]),
    "one number in two groups": [*fields(), *fields()],
    "a number that is a bool": fields(numbers=[True]),
    "a number that is a text": fields(numbers=["4"]),
    "a number that is a fraction": fields(numbers=[4.5]),
    "a negative number": fields(numbers=[-4]),
    "a head that is a text": fields(head="m"),
    "context variables that are numbers": fields(carried=[5]),
    "a context variable that is a text": fields(carried=[("name", "value")]),
    "a head that is no bytes": fields(head=[HEAD]),
    "columns that are a text": fields(columns=""),
    "a column that is a text": fields(columns=["7"]),
    "budgets that are a dict": fields(budgets={}),
    "a budget that is a text": fields(budgets=["soon"]),
    "more budgets than calls": fields(budgets=[1.0, 2.0]),
    "fewer budgets than calls": fields(numbers=[4, 5], budgets=[1.0]),
    "batches that are numbers": fields(batches=[5]),
    "a group that is a number": [5],
    "groups that are a number": 5,
}


@pytest.mark.parametrize("groups", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_frame_of_calls_is_refused(groups: Any) -> None:
    """A ValueError says so, for a frame as for a payload."""
    with pytest.raises(ValueError):  # noqa: PT011
        load_calls(dump(groups))
    with pytest.raises(ValueError):  # noqa: PT011
        load_payload(dump((("me", 1, 2), -1, groups)))


@pytest.mark.parametrize(
    "fields",
    [
        (("me", 1), -1, ONE_CALL),
        (("me", 1, "2"), -1, ONE_CALL),
        (("me", 1, 2), None, ONE_CALL),
        (("me", 1, 2), -1, fields(numbers=[4, 5])),
        (("me", 1, 2), -1, [*ONE_CALL, *fields(numbers=[5])]),
    ],
    ids=["a short session", "a wrong session", "no context", "two calls", "two groups"],
)
def test_what_is_no_payload_is_refused(fields: tuple[Any, ...]) -> None:
    """A payload names its session and its context, and has one call."""
    with pytest.raises(ValueError):  # noqa: PT011
        load_payload(dump(fields))


COLUMNS: dict[str, Any] = {
    "no column": [],
    "a column too many": [[1], [2]],
    "a cell too few": [[]],
    "a cell too many": [[1, 2]],
    "bytes": [b"1"],
}


@pytest.mark.promise("security.memory")
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_columns_that_are_not_those_of_the_head(columns: Any) -> None:
    """The group is rejected; nothing was allocated for what it declares."""
    (group,) = load_calls(dump(fields(columns=columns)))
    with pytest.raises(ValueError):  # noqa: PT011
        CallHead(group.head).rows(group, iter(()))


@pytest.mark.promise("security.frames_plain")
@pytest.mark.parametrize("load", [load_calls, load_payload, decode_reply])
def test_reading_a_frame_runs_no_code(load: Any) -> None:
    """A pickle in place of a message is none."""
    with pytest.raises(ValueError):  # noqa: PT011
        load(pickle.dumps([Unreadable()]))


@given(st.lists(st.none() | st.floats(-10, 10), min_size=1, max_size=6))
def test_budgets(budgets: list[float | None]) -> None:
    """Each call has what is left of its time; if none has a limit, nothing is said of it."""
    calls = [
        encoded(number, NamedTarget("method", ONE, "m"), due=None if left is None else NOW + left)
        for number, left in enumerate(budgets)
    ]
    ((group,), _) = message_of(calls)
    if any(left is not None for left in budgets):
        assert group.budgets == [
            left if left is None else pytest.approx(left, abs=1e-6) for left in budgets
        ]
    else:
        assert not group.budgets


def test_calls_of_other_batches_have_other_groups() -> None:
    """A group names the batches that wait for its calls."""
    own: tuple[Any, ...] = (("me", 1),)
    target = NamedTarget("method", ONE, "m")
    sent = [
        encode_call(CACHE, number, target, False, NOTHING, None, batches)
        for number, batches in enumerate(((), own, (), own, (*own, ("peer", 2))))
    ]
    groups, _ = message_of(sent)
    assert [(each.numbers, each.batches) for each in groups] == [
        ([0, 2], ()),
        ([1, 3], own),
        ([4], (*own, ("peer", 2))),
    ]
    assert not any(left is not None for each in groups for left in each.budgets)


@pytest.mark.promise("transport.arguments")
def test_keywords_keep_their_names() -> None:
    """In whichever order each caller wrote them."""
    calls = [call(1, b=2, a=3), call(1, a=4, b=5), call(a=6, b=7), call(8)]
    assert [work for *_, work in across(calls)] == [
        ((1,), {"b": 2, "a": 3}),
        ((1,), {"a": 4, "b": 5}),
        ((), {"a": 6, "b": 7}),
        ((8,), {}),
    ]


@pytest.mark.promise("transport.identity")
@pytest.mark.parametrize(
    "value",
    [[1], {"key": 1}, torch.zeros(2), torch.zeros(INLINE_BYTES), torch.ones(2, requires_grad=True)],
    ids=["list", "dict", "small", "large", "requires_grad"],
)
def test_what_is_passed_twice_arrives_as_one(value: Any) -> None:
    """Whoever changes the one sees it in the other, as in a local call."""
    ((*_, (args, kwargs)),) = across([call(value, 1, value, again=value)])
    assert args[0] is args[2] is kwargs["again"]
    ((*_, (args, kwargs)),) = across([call(value, inside=[value])])
    assert args[0] is kwargs["inside"][0]


@pytest.mark.promise("transport.identity")
def test_equal_arguments_of_two_calls_are_two() -> None:
    """Calls have nothing to do with each other, though they travel together."""
    small = torch.zeros(2)
    (*_, (one, _)), (*_, (other, _)) = across([call(small), call(small)])
    one[0].fill_(7)
    assert other[0].tolist() == [0, 0]


@pytest.mark.promise("transport.copied")
def test_small_arguments_are_copied_at_the_call() -> None:
    """They may be changed at once: as a column's cell, and in a pickle."""
    tensor, items = torch.zeros(3), [1]
    calls = [call(tensor), call([tensor], items)]
    tensor.fill_(1)
    items.append(2)
    (*_, (one, _)), (*_, (other, _)) = across(calls)
    assert one[0].tolist() == other[0][0].tolist() == [0, 0, 0]
    assert other[1] == [1]


@pytest.mark.parametrize("value", [(n for n in "ab"), threading.Lock()], ids=["generator", "lock"])
def test_what_cannot_be_sent_fails_at_the_call(value: Any) -> None:
    """Only its caller gets the error."""
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        call(1, value)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        encode_cell(value)


def test_size_counts_all_that_is_sent() -> None:
    """What decides whether a call goes alone, and how many may be on their way."""
    assert call(torch.zeros(10_000)).size > 40_000
    assert call("x" * 100_000).size > 100_000
    assert call([torch.zeros(10_000), b"x" * 5000]).size > 45_000


@pytest.mark.parametrize("count", [0, 1, 10_000])
@pytest.mark.parametrize("value", [1.5, 2**64 - 1, "", "é", "\U0001f600", b"", torch.tensor(True)])
@pytest.mark.parametrize("named", [True, False])
def test_a_call_takes_at_most_twice_its_size(count: int, value: Any, named: bool) -> None:
    """So a frame holds as many calls as `SendState` puts into one."""
    values = [value.clone() if isinstance(value, Tensor) else value for _ in range(count)]
    work = ((), {f"{n}": each for n, each in enumerate(values)}) if named else (values, {})
    target, batches = NamedTarget("method", ONE, "m" * 500), (("worker", 1 << 60),) * count
    found = encode_call(CACHE, 1 << 60, target, False, work, NOW, batches)
    assert len(dump(encode_calls([found], NOW, TensorTable()))) <= 2 * found.size
    assert 2 * FRAME_BYTES <= MAX_FRAME


@pytest.mark.promise("transport.large")
@pytest.mark.parametrize(
    ("value", "is_large"),
    [
        (1, False),
        ("x" * (INLINE_BYTES - CALL_OVERHEAD), False),
        ("x" * (INLINE_BYTES - CALL_OVERHEAD + 1), True),
        (filled(torch.uint8, (INLINE_BYTES - CALL_OVERHEAD,), 1), False),
        (filled(torch.uint8, (INLINE_BYTES - CALL_OVERHEAD + 1,), 1), True),
        ([b"x" * (INLINE_BYTES // 2)], False),
        ([b"x" * INLINE_BYTES], True),
        (torch.ones(2, requires_grad=True), True),
        ([torch.ones(2, requires_grad=True)], True),
        (torch.eye(3).to_sparse(), True),
    ],
)
def test_large_calls(value: Any, is_large: bool) -> None:
    """Those above the limit, and those with tensors that are no bytes, have a frame for each."""
    found = call(value)
    assert found.is_large is is_large
    assert not found.by_torch
    assert repr(found) == f"<EncodedCall {found.number}, {found.size} bytes>"


def test_small_arguments_add_up() -> None:
    """Many small arguments are large together."""
    part = torch.zeros(INLINE_BYTES // 16)
    assert not call(*(part + n for n in range(3))).is_large
    assert call(*(part + n for n in range(4))).is_large


def test_a_call_of_a_large_target() -> None:
    """What a partial holds counts as its arguments do."""
    for held in (torch.zeros(INLINE_BYTES), b"x" * INLINE_BYTES, torch.ones(1, requires_grad=True)):
        target = FunctionTarget(functools.partial(torch.add, held))
        for work in (((1,), {}), (([1],), {})):
            assert encoded(0, target, work=work).is_large
    small = FunctionTarget(functools.partial(torch.add, torch.zeros(2)))
    assert not encoded(0, small).is_large


@pytest.mark.parametrize("number", [1, 3])
def test_a_large_target_arrives(number: int) -> None:
    """With the tensors of its own, before those of the arguments; of each call its own."""
    held = [torch.full((INLINE_BYTES,), float(n)) for n in range(number)]
    sent = [
        encoded(n, FunctionTarget(functools.partial(torch.add, each)), work=((each + 1,), {}))
        for n, each in enumerate(held)
    ]
    for (_, target, _, (args, _)), each in zip(across(sent), held, strict=True):
        assert torch.equal(target.function.args[0], each)
        assert torch.equal(args[0], each + 1)


# ── what cannot be read ─────────────────────────────────────────────────────────────────────────


class Unreadable:
    """Can be sent; whoever reads it gets an error."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("unreadable")


def test_an_unreadable_argument_fails_alone() -> None:
    """In a group with others that can be read, and that have tensors too."""
    large = torch.arange(float(INLINE_BYTES))
    values: list[Any] = [[1], Unreadable(), [large], [large, Unreadable()], [large + 1]]
    works = [work for *_, work in across([call(value) for value in values])]
    assert works[0] == (([1],), {})
    assert torch.equal(works[2][0][0][0], large)
    assert torch.equal(works[4][0][0][0], large + 1)
    for failed in (works[1], works[3]):
        assert isinstance(failed, RemoteFailure)
        with pytest.raises(LookupError, match="unreadable"):
            failed.raise_()


def test_an_unreadable_target_fails_alone() -> None:
    """The other groups of the message are read."""
    unreadable = FunctionTarget(functools.partial(max, Unreadable()))
    calls = [
        encoded(0, unreadable, work=((torch.zeros(INLINE_BYTES),), {})),
        call(torch.zeros(INLINE_BYTES)),
    ]
    (_, target, _, _), (_, other, _, work) = across(calls)
    assert isinstance(target, RemoteFailure)
    assert other == MethodTarget(ONE, "m")
    assert work[0][0].shape == (INLINE_BYTES,)


def test_an_unreadable_result_fails_alone() -> None:
    """Its caller gets the error, the others their values."""
    large = torch.arange(float(INLINE_BYTES))
    values = [[large], Unreadable(), [Unreadable(), large], [2 * large], 5]
    found = returned([(number, *encode_cell(value)) for number, value in enumerate(values)])
    assert torch.equal(found[0][0], large)
    assert torch.equal(found[3][0], 2 * large)
    assert found[4] == 5
    for number in (1, 2):
        assert isinstance(found[number], RemoteFailure)


# ── results ─────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(VALUES, max_size=8))
def test_results_arrive_as_they_were(values: list[Any]) -> None:
    """Any values together, each with its key."""
    found = returned([(number, *encode_cell(value)) for number, value in enumerate(values)])
    assert sorted(found) == [*range(len(values))]
    for number, value in enumerate(values):
        assert same(value, found[number])


def test_ends_failures_and_items() -> None:
    """What else an answer carries: errors, items of streams, and their ends."""
    failure = RemoteFailure.of(ValueError("v"), "there")
    found = returned(
        [
            ((1, 0, 1), *encode_cell("item")),
            (2, FAILED, failure),
            ((1, 2, 0), ENDED, None),
            ((3, 0, 0), FAILED, failure),
            ((1, 1, 2), *encode_cell([1])),
            ((4, 0, 0), ENDED, None),
        ]
    )
    assert found[1, 0, 1] == "item"
    assert found[1, 1, 2] == [1]
    assert found[1, 2, 0] is STREAM_END is found[4, 0, 0]
    assert found[2].on_the_wire() == found[3, 0, 0].on_the_wire() == failure.on_the_wire()


ITEM_CELLS = st.one_of(
    NUMBERS.map(encode_cell),
    NUMBERS.map(lambda number: encode_cell([number])),
    NUMBERS.map(lambda number: encode_cell(torch.tensor([number]))),
    NUMBERS.map(lambda number: (HELD, number)),
    st.just((ENDED, None)),
    st.just((FAILED, RemoteFailure.of(ValueError("v"), "there"))),
)


@pytest.mark.promise("streams.order")
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), ITEM_CELLS), max_size=20))
def test_items_of_streams_stay_in_order(results: list[Any]) -> None:
    """Whatever kinds they are of, and whatever results of calls lie between them."""
    keys = [(call, index, 1) if item else index for index, (item, call, _) in enumerate(results)]
    sent = [(key, *content) for key, (_, _, content) in zip(keys, results, strict=True)]
    found = decode_reply(*encode_reply(sent))
    assert [key for key, _ in found if type(key) is tuple] == [
        key for key in keys if type(key) is tuple
    ]
    assert sorted(map(repr, keys)) == sorted(repr(key) for key, _ in found)


def test_a_result_that_is_held_says_its_size() -> None:
    """Its place in the frame names no more than the bytes of its value."""
    found = returned([(1, HELD, 3), ((2, 0, 1), HELD, 1 << 40)])
    assert {key: type(value) for key, value in found.items()} == {
        1: HeldResult,
        (2, 0, 1): HeldResult,
    }
    assert (found[1].size, found[2, 0, 1].size) == (3, 1 << 40)


def test_a_result_of_plain_values_has_no_tensors() -> None:
    """Only what torch must carry itself goes through torch's table."""
    assert encode_reply([(0, *encode_cell(torch.zeros(4)))])[1] == []
    data, tensors = encode_reply([])
    assert tensors == []
    assert decode_reply(data) == []
    data, tensors = encode_reply([(0, *encode_cell(torch.zeros(INLINE_BYTES)))])
    assert len(tensors) == 1
    assert len(data) < 1000


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_column(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Each a tensor of its own: equal, contiguous, writable, and of its own extent."""
    values = [filled(dtype, shape, 10 * number) for number in range(3)]
    rows = [args[0] for *_, (args, _) in across([call(value) for value in values])]
    found = returned([(number, *encode_cell(value)) for number, value in enumerate(values)])
    for each in (rows, [found[number] for number in range(3)]):
        assert all(map(same, values, each))
        for row in each:
            assert row.is_contiguous()
            assert row.is_leaf
            assert row.untyped_storage().nbytes() == row.nbytes
        each[1].zero_()
        assert same(each[0], values[0])
        assert same(each[2], values[2])


def permuted(count: int) -> list[Tensor]:
    x = torch.arange(24.0 * count).reshape(count, 2, 3, 4)
    return [*x.permute(0, 3, 1, 2)]


VIEWS = {
    "transposed": lambda: [each.t() for each in torch.arange(18).reshape(3, 2, 3)],
    "permuted": lambda: permuted(3),
    "channels last": lambda: [
        torch.full((2, 3, 4, 5), float(n)).to(memory_format=torch.channels_last) for n in range(3)
    ],
    "of a larger storage": lambda: [
        torch.arange(48.0).reshape(6, 8)[:, n : n + 2].t() for n in range(3)
    ],
    "large": lambda: [torch.ones(100, 300, dtype=torch.int32).t() for _ in range(3)],
}


@pytest.mark.promise("transport.strides")
@pytest.mark.parametrize("kind", VIEWS)
def test_strides_of_a_column(kind: str) -> None:
    """Alone, in a column and in a pickle: as those of a copy by `clone`, as torch sends them."""
    values = VIEWS[kind]()
    rows = [args[0] for *_, (args, _) in across([call(value) for value in values])]
    found = returned([(number, *encode_cell(value)) for number, value in enumerate(values)])
    packed = pack({"views": values})
    data, _, *outside = packed.on_the_wire()
    inside = unpack(data, packed.tensors, *outside)["views"]
    for each in (rows, [found[number] for number in range(3)], [*map(argument, values)], inside):
        for value, row in zip(values, each, strict=True):
            assert same(row, value)
            assert row.stride() == value.clone().stride()
            assert not row.is_contiguous()
            assert row.untyped_storage().nbytes() == row.nbytes
        each[1].zero_()
        assert same(each[0], values[0])


@pytest.mark.promise("transport.arguments")
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("dtype", NAMED_DTYPES.values(), ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Their bytes arrive, alone and in a column: also of those that torch can hardly compute."""
    size = math.prod(shape) * dtype.itemsize
    values = [
        torch.frombuffer(bytearray(n == 0 for n in range(at, at + size)), dtype=dtype)
        for at in (0, -1, -2)
    ]
    values = [each.reshape(shape) for each in values]
    assert (direct_cell(values[0]) or "none")[0] == (dtype, shape, ())
    rows = [args[0] for *_, (args, _) in across([call(value) for value in values])]
    found = returned([(number, *encode_cell(value)) for number, value in enumerate(values)])
    for each in (rows, [found[number] for number in range(3)], [*map(argument, values)]):
        for value, row in zip(values, each, strict=True):
            assert (row.dtype, row.shape) == (dtype, shape)
            assert bytes_of(row) == bytes_of(value)


def bytes_of(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


@pytest.mark.promise("transport.copied")
@given(small_tensors(), st.integers(1, 3))
def test_a_sent_tensor_is_a_copy(tensor: Tensor, count: int) -> None:
    """The bytes do not change with the tensor, nor what arrives of two calls with each other."""
    before, sent = tensor.clone(), [call(tensor) for _ in range(count)]
    tensor.zero_()
    for _ in range(2):
        rows = [args[0] for *_, (args, _) in across(sent)]
        assert all(same(row, before) for row in rows)
        rows[0].zero_()
        assert all(same(row, before) for row in rows[1:])


@pytest.mark.parametrize("size", [4, INLINE_BYTES])
def test_a_tensor_without_memory_is_not_read(size: int) -> None:
    """Its storage was freed: bytes of other objects would be sent in its place."""
    tensor = torch.zeros(size)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage"):
        argument(tensor)


@pytest.mark.parametrize("arrive", [argument, result])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_a_row_takes_part_in_autograd(arrive: Any, shape: tuple[int, ...]) -> None:
    """It may be changed in place by what requires grad, and require it itself."""
    row, weight = arrive(torch.ones(shape)), torch.full(shape, 3.0, requires_grad=True)
    row.mul_(weight)
    row.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(shape))
    leaf = arrive(torch.ones(shape)).requires_grad_()
    (2 * leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.full(shape, 2.0))
    with torch.no_grad():
        leaf.zero_()


@pytest.mark.parametrize("arrive", [argument, result])
def test_a_row_with_strides_takes_part_in_autograd(arrive: Any) -> None:
    """As a contiguous one does."""
    row, weight = arrive(torch.ones(2, 3).t()), torch.full((3, 2), 3.0, requires_grad=True)
    row.mul_(weight)
    row.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(3, 2))
    leaf = arrive(torch.ones(2, 3).t()).requires_grad_()
    (2 * leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.full((3, 2), 2.0))


def test_a_saved_row_is_small() -> None:
    """It does not take the column along."""
    calls = [call(torch.zeros(8, 8)) for _ in range(100)]
    row = across(calls)[50][3][0][0]
    file = io.BytesIO()
    torch.save(row, file)
    alone = io.BytesIO()
    torch.save(torch.zeros(8, 8), alone)
    assert abs(file.tell() - alone.tell()) < 200
    assert len(pickle.dumps(row)) < 1000


@pytest.mark.parametrize("arrive", [argument, result])
def test_what_no_column_holds_keeps_what_it_is(arrive: Any) -> None:
    """Subclasses, what requires grad, and what is large and need not be copied."""
    parameter = torch.nn.Parameter(torch.ones(2))
    assert type(arrive(parameter)) is torch.nn.Parameter
    assert arrive(torch.ones(2, requires_grad=True)).requires_grad
    large = torch.zeros(INLINE_BYTES)
    assert arrive(large).data_ptr() == large.data_ptr()
    conj = torch.tensor([1 + 2j]).conj()
    assert torch.equal(arrive(conj), conj)


def test_under_inference_mode() -> None:
    """What a policy returns, and what is called from inside."""
    with torch.inference_mode():
        tensor = torch.ones(3) * 2
        assert torch.equal(argument(tensor), tensor)
    row = result(tensor)
    assert torch.equal(row, torch.full((3,), 2.0))
    assert not row.is_inference()
