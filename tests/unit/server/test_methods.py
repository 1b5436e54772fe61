"""What the head of a group names: looked up once, and again whenever it may be another."""

import gc
import weakref
from types import MethodType
from typing import Any, NamedTuple

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import NotExported
from aiorpc_torch._server.calls import RpcCall
from aiorpc_torch._server.exclusive_calls import Entrance, ExclusiveCall, ExclusiveStream
from aiorpc_torch._server.exports import ExportPolicy
from aiorpc_torch._server.methods import KnownHead
from aiorpc_torch._server.stream_writer import StreamCall
from aiorpc_torch._torch import rrefs
from aiorpc_torch._wire.messages import HeadCache
from aiorpc_torch._wire.targets import BoundTarget, FetchTarget, FunctionTarget, MethodTarget
from aiorpc_torch._wire.wire_targets import encode_target

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
    return KnownHead(HeadCache().head(named, stream, (), ()).data)


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
        assert (found.kind is ExclusiveCall) == (kind is Single)
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
    first, second = resolve(known), resolve(known)
    assert first.kind is second.kind is (ExclusiveStream if stream else ExclusiveCall)
    for found in (first, second):
        assert isinstance(found.joiner, Entrance)
    assert first.joiner.turns is second.joiner.turns  # type: ignore[union-attr]


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
