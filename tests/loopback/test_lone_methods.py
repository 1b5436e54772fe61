"""Methods of lone calls: remembered by the session, with the decisions of calls made together."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, remote


class Agent:
    """An object whose methods the tests replace."""

    @classmethod
    async def kind(cls) -> str:
        return cls.__name__

    async def act(self, x: int) -> int:
        return x + 1

    def plain(self, x: int) -> int:
        return x + 2

    @aiorpc.batched(max_size=4)
    async def many(self, xs: list[int]) -> list[int]:
        return [x + 3 for x in xs]


async def _on_loop(self: Agent, x: int) -> int:
    return x + 10


def _in_thread(self: Agent, x: int) -> int:
    return x + 20


@aiorpc.batched(max_size=4)
async def _joined(self: Any, xs: list[int]) -> list[int]:
    return [x + 30 for x in xs]


async def outcome(agent: "RRef[Agent]", name: str, *args: int) -> Any:
    """Return the result of a lone call, or the class of its exception; calls together agree."""
    method = getattr(remote(agent), name)
    alone = await asyncio.gather(method(*args), return_exceptions=True)
    together = await asyncio.gather(*(method(*args) for _ in range(3)), return_exceptions=True)
    found = [type(each) if isinstance(each, Exception) else each for each in alone + together]
    assert found == found[:1] * 4
    return found[0]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", ["act", "plain", "many"])
async def test_a_replaced_method_is_the_one_that_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the class or on the instance; of any kind; and its own again."""
    agent = Agent()
    rref = RRef(agent)
    own = await outcome(rref, name, 0)
    for function, value in ((_on_loop, 10), (_in_thread, 20)):
        with monkeypatch.context() as patch:
            patch.setattr(Agent, name, function)
            assert await outcome(rref, name, 0) == value
            patch.setattr(agent, name, lambda x: x + 40, raising=False)
            assert await outcome(rref, name, 0) == 40
        assert await outcome(rref, name, 0) == own
    with monkeypatch.context() as patch:
        patch.delattr(Agent, name)
        assert await outcome(rref, name, 0) is AttributeError
        patch.setattr(Agent, name, 5, raising=False)
        assert await outcome(rref, name, 0) is TypeError
    assert await outcome(rref, name, 0) == own


@pytest.mark.usefixtures("world")
async def test_a_batched_function_can_replace_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a method can replace a batched function."""
    rref = RRef(Agent())
    assert await outcome(rref, "act", 0) == 1
    monkeypatch.setattr(Agent, "act", _joined)
    assert await outcome(rref, "act", 0) == 30
    monkeypatch.setattr(Agent, "many", _on_loop)
    assert await outcome(rref, "many", 0) == 10


@pytest.mark.usefixtures("world")
async def test_methods_that_are_not_bound_to_the_object() -> None:
    """A class method, and a method of another object."""
    agent, other = Agent(), Agent()
    rref = RRef(agent)
    assert await outcome(rref, "kind") == "Agent"
    agent.act = other.plain  # type: ignore[assignment,method-assign]
    assert await outcome(rref, "act", 0) == 2
    assert await outcome(rref, "missing", 0) is AttributeError


class Moody(Agent):
    """An object whose attributes are code of the user, which may fail."""

    refuses = False

    def __getattribute__(self, name: str) -> Any:
        if name == "act" and type(self).refuses:
            raise LookupError("not now")
        return super().__getattribute__(name)


@pytest.mark.usefixtures("world")
async def test_an_object_that_refuses_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """After calls that it took: the call alone fails, and later ones are served."""
    moody = RRef(Moody())
    assert await outcome(moody, "act", 1) == 2
    monkeypatch.setattr(Moody, "refuses", True)
    assert await outcome(moody, "act", 1) is LookupError
    monkeypatch.undo()
    assert await outcome(moody, "act", 1) == 2


@pytest.mark.usefixtures("world")
async def test_methods_of_one_name_of_two_objects() -> None:
    """The caller and the callee tell them apart."""

    class Other(Agent):
        async def act(self, x: int) -> int:
            return x + 7

    one, two = RRef(Agent()), RRef(Other())
    for _ in range(3):
        assert await outcome(one, "act", 0) == 1
        assert await outcome(two, "act", 0) == 7


@pytest.mark.usefixtures("world")
async def test_what_is_remembered_keeps_nothing_alive() -> None:
    """After lone calls of each kind the object is freed with its last RRef."""
    agent = Agent()
    alive, rref = weakref.ref(agent), RRef(agent)
    del agent
    for name in ("act", "plain", "many"):
        await outcome(rref, name, 0)
    del rref
    for _ in range(1000):
        gc.collect()
        if alive() is None:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the object lives on")
