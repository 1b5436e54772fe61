"""Heads of calls are resolved once."""

import functools
import gc
import itertools
import weakref
from collections.abc import AsyncIterator
from operator import add, mul
from types import MethodType
from typing import Any, NamedTuple

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import NotExported, call
from aiorpc_torch._server.calls import RpcCall
from aiorpc_torch._server.dispatch import KnownHead
from aiorpc_torch._server.exclusive_calls import Entrance, ExclusiveCall, ExclusiveStream
from aiorpc_torch._server.exports import ExportPolicy
from aiorpc_torch._server.stream_writer import StreamCall
from aiorpc_torch._torch import rrefs
from aiorpc_torch._wire.messages import (
    MAX_HEADS,
    MAX_KNOWN_HEAD,
    Group,
    HeadCache,
    encode_call,
    encode_calls,
)
from aiorpc_torch._wire.plain import dump
from aiorpc_torch._wire.targets import BoundTarget, FetchTarget, FunctionTarget, MethodTarget
from aiorpc_torch._wire.tensor_table import TensorTable
from aiorpc_torch._wire.wire_targets import NamedTarget, encode_target
from tests.support.received_calls import load_calls
from tests.support.two_ends import TwoEnds, two_ends


@pytest.fixture
async def ends() -> AsyncIterator[TwoEnds]:
    async with two_ends() as ends:
        yield ends


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
    return ends.session.dispatcher.calls_of(*groups_of(*calls), None, 0.0)


@pytest.fixture
async def opened(ends: TwoEnds) -> TwoEnds:
    """With a connection that knows no head."""
    assert await call("far", mul, 3, 4) == 12
    ends.session.dispatcher.heads.clear()
    return ends


async def test_a_head_is_known_after_its_first_call(opened: TwoEnds) -> None:
    """A lone call and calls in a group have the same, and resolve alike."""
    (alone,) = resolved(opened, (ADD, 1, 2))
    (data,) = opened.session.dispatcher.heads
    known = opened.session.dispatcher.heads[data]
    together = resolved(opened, (ADD, 3, 4), (ADD, 5, 6))
    assert opened.session.dispatcher.heads == {data: known}
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
    found = opened.session.dispatcher.calls_of(groups[::-1], tensors, None, 0.0)
    assert [each.arguments[0] for each in found] == [tuple(args) for _, *args in sent]


@pytest.mark.promise("security.memory")
async def test_heads_that_are_not_remembered(opened: TwoEnds) -> None:
    """Those with pickles, which differ from call to call, and long ones."""
    partial = encode_target(FunctionTarget(functools.partial(add, 1)), None)
    many = [0] * MAX_KNOWN_HEAD
    ((one,), (other,)) = resolved(opened, (partial, 2)), resolved(opened, (ADD, *many))
    assert one.function(*one.arguments[0]) == 3
    assert len(other.arguments[0]) == MAX_KNOWN_HEAD
    assert not opened.session.dispatcher.heads


@pytest.mark.promise("security.memory")
async def test_the_heads_that_are_known_are_few(opened: TwoEnds) -> None:
    """A peer that names ever new targets takes no memory for each."""
    for number in range(MAX_HEADS + 10):
        missing = NamedTarget("function", None, f"missing{number}", "_operator")
        (found,) = resolved(opened, (missing, 1))
        with pytest.raises(AttributeError):
            found.function()
        assert 0 < len(opened.session.dispatcher.heads) <= MAX_HEADS


async def test_a_target_that_fails_is_resolved_again(
    opened: TwoEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head is known whether its target is there or not; calls after it see what is there then."""
    target = NamedTarget("function", None, "later", __name__)
    for _ in range(2):
        (missing,) = resolved(opened, (target, 1))
        with pytest.raises(AttributeError):
            missing.function()
    monkeypatch.setitem(globals(), "later", mul)
    (found,) = resolved(opened, (target, 1))
    assert found.function is mul
    monkeypatch.setitem(globals(), "later", add)
    (found,) = resolved(opened, (target, 1))
    assert found.function is add


async def test_a_group_that_is_malformed_fails_its_whole_frame(opened: TwoEnds) -> None:
    """Each of its calls is answered, once, and the connection goes on."""
    groups, _ = groups_of((ADD, 1, 2), (ADD, "a", "b"))
    groups.append(Group(b"no head", [next(NUMBERS)], []))
    with pytest.raises(ValueError):  # noqa: PT011
        opened.session.dispatcher.calls_of(groups, (), None, 0.0)
    assert await call("far", add, 1, 2) == 3


# ── heads ─────────────────────────────────────────────────────────────────────────────────────────


ID = (0, 1)


class Agent:
    """An object whose methods the tests replace."""

    async def act(self) -> str:
        return "act"

    def plain(self) -> str:
        return "plain"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @aiorpc.batched(max_size=4)
    async def many(self, xs: list[int]) -> list[int]:
        return xs


class Slotted:
    """An object without weak references."""

    __slots__ = ()

    def plain(self) -> str:
        return "slotted"


@aiorpc.exclusive
class Single:
    """An object whose calls take turns."""

    def plain(self) -> str:
        return "single"


class Table(rrefs.RRefTable):
    """Objects by their ids, which counts how often one is looked up."""

    def __init__(self) -> None:
        super().__init__(0, counted=False)
        self.objects: dict[Any, Any] = {}
        self.found = 0

    def find(self, named: Any) -> Any:
        self.found += 1
        if named not in self.objects:
            raise ReferenceError("it was freed")
        return self.objects[named]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = Table()
    table.objects[ID] = Agent()
    monkeypatch.setattr(rrefs, "_table", table)
    return table


def head(target: Any, *, stream: bool = False) -> KnownHead:
    """The head of calls without arguments, as a session reads it."""
    named = encode_target(target, target.on)
    return KnownHead(HeadCache()[named, stream, (), ()].data)


def method(name: str, *, stream: bool = False) -> KnownHead:
    return head(MethodTarget(ID, name), stream=stream)


class Found(NamedTuple):
    function: Any
    on_loop: bool
    joiner: Any
    kind: Any


def resolve(known: KnownHead, exports: ExportPolicy | None = None) -> Found:
    return Found(*known.resolve(iter(()), exports))


@pytest.mark.parametrize("name", ["act", "plain"])
def test_a_method_is_looked_up_once(table: Table, name: str) -> None:
    """Then its object is known, and is not kept alive."""
    known = method(name)
    first = resolve(known)
    assert first.function == getattr(table.objects[ID], name)
    assert (first.on_loop, first.joiner, first.kind) == (name == "act", None, RpcCall)
    assert known.key == ID
    for _ in range(3):
        assert resolve(known) == first
    assert table.found == 1
    alive = weakref.ref(table.objects.pop(ID))
    del first
    gc.collect()
    assert alive() is None


def test_an_object_that_has_gone(table: Table) -> None:
    """Each later call is told, and the key of its object stays known."""
    known = method("plain")
    resolve(known)
    del table.objects[ID]
    gc.collect()
    for _ in range(2):
        with pytest.raises(ReferenceError, match="freed"):
            resolve(known)
    assert known.key == ID


def test_an_object_that_was_replaced(table: Table) -> None:
    """The calls go to the one that has the id now, of whatever class it is."""
    known = method("plain")
    resolve(known)
    for kind in (Agent, Slotted, Single, Agent):
        table.objects[ID] = kind()  # the only reference to each
        gc.collect()
        found = resolve(known)
        assert found.function() == kind().plain()
        assert (getattr(found.kind, "func", None) is ExclusiveCall) == (kind is Single)
        del found


def test_a_method_that_is_patched(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its class or its instance, by a function of whatever kind; and its own again."""
    agent, known = table.objects[ID], method("plain")
    own = resolve(known)
    with monkeypatch.context() as patch:
        patch.setattr(Agent, "plain", Agent.act)
        found = resolve(known)
        assert (found.function, found.on_loop) == (agent.act, True)
        patch.setattr(agent, "plain", lambda: "lambda", raising=False)
        for _ in range(2):
            assert resolve(known).function() == "lambda"
        patch.setattr(agent, "plain", Agent().act)
        assert resolve(known).function.__self__ is not agent
        patch.setattr(agent, "plain", MethodType(Agent.many, agent))
        joins = resolve(known).joiner
        assert joins is not None
    assert resolve(known) == own
    with monkeypatch.context() as patch:
        patch.delattr(Agent, "plain")
        with pytest.raises(AttributeError):
            resolve(known)
        patch.setattr(Agent, "plain", 5, raising=False)
        with pytest.raises(TypeError):
            resolve(known)
        patch.setattr(Agent, "plain", property(lambda _: 1 / 0))
        with pytest.raises(TypeError, match="property"):
            resolve(known)
    assert resolve(known) == own


def test_a_batched_method(table: Table) -> None:
    """Its calls join the batches of their object, whether it was looked up or known."""
    known = method("many")
    first, second = resolve(known), resolve(known)
    assert table.found == 1
    for found in (first, second):
        assert found.kind is RpcCall
        assert found.joiner is not None
        assert not isinstance(found.joiner, Entrance)
        assert found.joiner.args == (table.objects[ID],)


def test_a_batched_method_of_another_object(table: Table) -> None:
    """Its calls join the batches of that object, whose method the known one is now."""
    known, other = method("many"), Agent()
    resolve(known)
    table.objects[ID].many = other.many
    found = resolve(known)
    assert found.function.__self__ is other
    assert found.joiner.args == (other,)


@pytest.mark.parametrize("stream", [False, True])
def test_the_calls_of_an_exclusive_object(table: Table, stream: bool) -> None:
    """They enter its turns; the object is looked up each time."""
    table.objects[ID] = Single()
    known = method("plain", stream=stream)
    kinds = [resolve(known).kind for _ in range(2)]
    assert {each.func for each in kinds} == {ExclusiveStream if stream else ExclusiveCall}
    (first,), (second,) = (each.args for each in kinds)
    assert isinstance(first, Entrance)
    assert first.turns is second.turns


def test_streams(table: Table) -> None:
    """They have a class of their own, also when the method is known."""
    known = method("plain", stream=True)
    assert [resolve(known).kind for _ in range(2)] == [StreamCall] * 2
    assert table.found == 1


def helper(agent: Agent) -> str:
    return f"helped {agent.plain()}"


def test_what_is_no_method_of_the_object_is_looked_up_each_time(table: Table) -> None:
    """A class method, a function that is given the object, the object itself; an object without
    weak references."""
    for target in (MethodTarget(ID, "of_class"), BoundTarget(ID, helper), FetchTarget(ID)):
        before, known = table.found, head(target)
        for _ in range(2):
            resolve(known)
        assert table.found == before + 2
        assert known.key == ID
    table.objects[ID] = Slotted()
    known = method("plain")
    assert [resolve(known).function() for _ in range(2)] == ["slotted"] * 2


def test_functions_have_a_key_too() -> None:
    """Their calls stay in order among themselves."""
    known = head(FunctionTarget(len))
    assert resolve(known).function is len
    assert known.key == "builtins.len"


@pytest.mark.promise("security.exports")
def test_what_is_not_exported_stays_so(table: Table) -> None:
    """Each call is told, whatever was called before."""
    allowed = ExportPolicy([Agent], "ps")
    refused = ExportPolicy([Single], "ps")
    known = method("plain")
    with pytest.raises(NotExported):
        resolve(known, refused)
    with pytest.raises(NotExported):
        resolve(known, refused)
    resolve(known, allowed)
    assert table.found == 3
    with pytest.raises(AttributeError, match="private"):
        resolve(method("_private"), allowed)
