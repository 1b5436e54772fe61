"""Calls of one frame: what is wrong with one of them is its own."""

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator
from operator import add, mul, sub
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import NotExported, call
from aiorpc_torch._aio.deadlines import current_deadline, time_left
from aiorpc_torch._server.calls import RpcCall
from aiorpc_torch._server.dispatch import calls_of
from aiorpc_torch._wire.frames import CALLS
from aiorpc_torch._wire.messages import (
    MAX_HEADS,
    MAX_KNOWN_HEAD,
    Group,
    HeadCache,
    encode_call,
    encode_calls,
    load_calls,
)
from aiorpc_torch._wire.plain import dump
from aiorpc_torch._wire.targets import FunctionTarget
from aiorpc_torch._wire.tensor_table import TensorTable
from aiorpc_torch._wire.wire_targets import NamedTarget, encode_target
from tests.support.raw_connections import Tap
from tests.support.two_ends import TwoEnds, two_ends

LOADED: list[str] = []


def load(name: str) -> str:
    LOADED.append(name)
    if name == "bad":
        raise ValueError("it cannot be read")
    return name


class Loaded:
    """An argument that the callee loads."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return load, (self.name,)


def seconds_left() -> float | None:
    return time_left(current_deadline())


STARTED: list[int] = []


async def first(number: int) -> None:
    STARTED.append(number)


async def second(number: int) -> None:
    STARTED.append(number)


async def third(number: int) -> None:
    STARTED.append(number)


@pytest.fixture
async def ends() -> AsyncIterator[TwoEnds]:
    async with two_ends() as ends:
        LOADED.clear()
        STARTED.clear()
        yield ends


async def results(*calls: Any) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_arguments_that_cannot_be_read(
    ends: TwoEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their call fails; the others of the frame run."""
    tap = Tap(monkeypatch)
    found = await results(
        call("far", add, 1, 2), call("far", str, Loaded("bad")), call("far", str, Loaded("good"))
    )
    assert tap.count(CALLS) == 1
    assert found[::2] == [3, "good"]
    assert isinstance(found[1], ValueError)
    assert str(found[1]) == "it cannot be read"


async def test_a_call_that_is_not_exported() -> None:
    """It fails alone, and its arguments are not read."""
    LOADED.clear()
    async with two_ends([add, mul]):
        found = await results(
            call("far", add, 1, 2), call("far", sub, Loaded("never"), 1), call("far", mul, 3, 4)
        )
    assert found[::2] == [3, 12]
    assert isinstance(found[1], NotExported)
    assert not LOADED


@pytest.mark.parametrize("alone", [True, False])
async def test_the_time_left_travels(ends: TwoEnds, alone: bool) -> None:
    """Each call has its own deadline, in the callee's clock."""
    begin = time.monotonic()
    with aiorpc.timeout(1000.0):
        if alone:
            (left,) = await results(call("far", seconds_left))
        else:
            left, _ = await results(call("far", seconds_left), call("far", add, 1, 2))
    assert 1000.0 - (time.monotonic() - begin) <= left <= 1000.0
    assert await call("far", seconds_left) is None


async def test_calls_start_in_the_order_of_their_frame(ends: TwoEnds) -> None:
    """Whichever functions they are of."""
    functions = [first, second, third]
    await results(*(call("far", functions[number % 3], number) for number in range(20)))
    assert [*range(20)] == STARTED


# ── heads that a session knows ──────────────────────────────────────────────────────────────────


ADD = NamedTarget("function", None, "add", "_operator")
CACHE = HeadCache()
NUMBERS = itertools.count(1 << 20)


def groups_of(*calls: Any) -> tuple[list[Group], TensorTable]:
    """Calls as they arrive; each is a target and its arguments."""
    tensors = TensorTable()
    encoded = [
        encode_call(CACHE, next(NUMBERS), target, False, (args, {}), None)
        for target, *args in calls
    ]
    return load_calls(dump(encode_calls(encoded, 0.0, tensors))), tensors


def resolved(ends: TwoEnds, *calls: Any) -> list[RpcCall]:
    """The calls of one frame, which are not started."""
    found = calls_of(*groups_of(*calls), ends.session, None, "far")
    for each in found:
        del ends.session.calls[each.number]
    return found


@pytest.fixture
async def opened(ends: TwoEnds) -> TwoEnds:
    """With a connection that knows no head."""
    assert await call("far", mul, 3, 4) == 12
    ends.session.heads.clear()
    return ends


async def test_a_head_is_known_after_its_first_call(opened: TwoEnds) -> None:
    """A lone call and calls in a group have the same, and resolve alike."""
    (alone,) = resolved(opened, (ADD, 1, 2))
    (data,) = opened.session.heads
    known = opened.session.heads[data]
    together = resolved(opened, (ADD, 3, 4), (ADD, 5, 6))
    assert opened.session.heads == {data: known}
    for each in (alone, *together):
        assert (each.function, each.on_loop, each.joiner, each.order_key) == (
            add, False, None, "_operator.add"
        )  # fmt: skip
    assert [each.arguments for each in (alone, *together)] == [
        ((1, 2), {}), ((3, 4), {}), ((5, 6), {})
    ]  # fmt: skip
    assert [each.number for each in together] == sorted(each.number for each in together)


class Unreadable:
    """Raises where it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("unreadable",)


async def test_a_call_with_unreadable_arguments_keeps_its_place(opened: TwoEnds) -> None:
    """It belongs to the object or function that it names, as the calls before it do."""
    (found,) = resolved(opened, (ADD, Unreadable()))
    assert found.order_key == "_operator.add"
    with pytest.raises(ValueError, match="unreadable"):
        found.function()


async def test_calls_of_several_groups_are_in_order(opened: TwoEnds) -> None:
    """By their numbers, whatever the order of their groups."""
    text = NamedTarget("function", None, "concat", "_operator")
    sent = [(ADD, 1, 2), (text, "a", "b"), (ADD, 3, 4), (text, "c", "d"), (ADD, 1.5, "x", 2)]
    found = resolved(opened, *sent)
    assert [each.arguments[0] for each in found] == [tuple(args) for _, *args in sent]
    groups, tensors = groups_of(*sent)
    assert len(groups) == 3
    found = calls_of(groups[::-1], tensors, opened.session, None, "far")
    assert [each.arguments[0] for each in found] == [tuple(args) for _, *args in sent]
    opened.session.calls.clear()


@pytest.mark.promise("security.memory")
async def test_heads_that_are_not_remembered(opened: TwoEnds) -> None:
    """Those with pickles, which differ from call to call, and long ones."""
    partial = encode_target(FunctionTarget(functools.partial(add, 1)), None)
    many = [0] * MAX_KNOWN_HEAD
    ((one,), (other,)) = resolved(opened, (partial, 2)), resolved(opened, (ADD, *many))
    assert one.function(*one.arguments[0]) == 3
    assert len(other.arguments[0]) == MAX_KNOWN_HEAD
    assert not opened.session.heads


@pytest.mark.promise("security.memory")
async def test_the_heads_that_are_known_are_few(opened: TwoEnds) -> None:
    """A peer that names ever new targets takes no memory for each."""
    for number in range(MAX_HEADS + 10):
        missing = NamedTarget("function", None, f"missing{number}", "_operator")
        (found,) = resolved(opened, (missing, 1))
        with pytest.raises(AttributeError):
            found.function()
        assert 0 < len(opened.session.heads) <= MAX_HEADS


async def test_a_target_that_fails_is_resolved_again(
    opened: TwoEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head is known whether its target is there or not; calls after it see what is there then."""
    target = NamedTarget("function", None, "later", __name__)
    for _ in range(2):
        (missing,) = resolved(opened, (target, 1))
        with pytest.raises(AttributeError):
            missing.function()
    monkeypatch.setitem(globals(), "later", second)
    (found,) = resolved(opened, (target, 1))
    assert found.function is second
    monkeypatch.setitem(globals(), "later", third)
    (found,) = resolved(opened, (target, 1))
    assert found.function is third


async def test_a_group_that_is_malformed_fails_its_whole_frame(opened: TwoEnds) -> None:
    """Each of its calls is answered, once, and the connection goes on."""
    groups, _ = groups_of((ADD, 1, 2), (ADD, "a", "b"))
    groups.append(Group(b"no head", [next(NUMBERS)], []))
    with pytest.raises(ValueError):  # noqa: PT011
        calls_of(groups, (), opened.session, None, "far")
    opened.session.calls.clear()
    assert await call("far", add, 1, 2) == 3
