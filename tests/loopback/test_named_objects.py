"""Named objects in a world of one: `register`, `unregister` and `lookup`."""

import asyncio
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    CallTimeout,
    Group,
    GroupError,
    NotExported,
    NotInWorld,
    call,
    create,
    fetch,
    remote,
    timeout,
)
from aiorpc_torch.autograd import context
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import world as world_of
from tests.support.group_members import Node, give_back, nodes
from tests.support.slack import BEGUN

pytestmark = pytest.mark.usefixtures("world")


async def test_registered_objects_are_found() -> None:
    """By name, also those of RRefs that this worker owns."""
    rref = aiorpc.register("node", Node(7))
    assert isinstance(rref, aiorpc.RRef)
    found = await aiorpc.lookup("node", on="main")
    assert await remote(found).add(1) == 8
    assert aiorpc.register("again", rref) is rref
    assert await remote(await aiorpc.lookup("again", on=0)).add(1) == 9
    # An object without weak references, and one that only the name holds.
    aiorpc.register("number", 5)
    assert await fetch(await aiorpc.lookup("number", on="main")) == 5


async def test_a_lookup_in_an_autograd_context() -> None:
    """It leaves the context as it was."""
    aiorpc.register("node", Node(2.0))
    x = torch.ones(1, requires_grad=True)
    async with context() as ctx:
        node = await aiorpc.lookup("node", on="main")
        await ctx.backward([(await remote(node).scale(x)).sum()])
        assert (await ctx.gradients())[x].tolist() == [2.0]


async def test_lookup_waits_for_the_registration() -> None:
    """Which may come from any thread; other names do not end the wait."""
    looking = asyncio.create_task(aiorpc.lookup("late", on="main"))
    aiorpc.register("other", Node())
    async with asyncio.timeout(20):
        while not stats().running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not looking.done()
    await asyncio.to_thread(aiorpc.register, "late", Node(3))
    assert await remote(await looking).add(1) == 4


async def test_a_lookup_in_time() -> None:
    """CallTimeout lists the names that are registered there."""
    aiorpc.register("one", Node())
    aiorpc.register("two", Node())
    text = (
        r"lookup of 'three' on worker 'main' timed out after 0.5 s; registered there: 'one', 'two'"
    )
    with pytest.raises(CallTimeout, match=text) as raised, timeout(BEGUN):
        await aiorpc.lookup("three", on="main")
    assert (raised.value.worker, raised.value.method) == ("main", "lookup")
    text = "lookup of 'three' timed out after 0.5 s; no living worker has registered it"
    with pytest.raises(CallTimeout, match=text) as raised, timeout(BEGUN):
        await aiorpc.lookup("three")
    assert (raised.value.worker, raised.value.method) == (None, "lookup")
    assert stats().in_flight == 0


@pytest.mark.promise("members.lookup")
async def test_a_lookup_finds_the_worker() -> None:
    """Without its name, now and when it registers later."""
    aiorpc.register("one", node := Node())
    assert (await aiorpc.lookup("one")).local_value() is node
    looking = asyncio.create_task(aiorpc.lookup("later"))
    await asyncio.wait([looking], timeout=0.01)
    assert not looking.done()
    aiorpc.register("later", other := Node())
    assert (await looking).local_value() is other


async def test_names_are_freed() -> None:
    """The object goes with its name, unless an RRef keeps it."""
    import gc
    import weakref

    gone = weakref.ref(node := Node())
    kept = weakref.ref(other := Node())
    aiorpc.register("gone", node)
    aiorpc.register("kept", other)
    del node, other
    rref = await aiorpc.lookup("kept", on="main")
    gc.collect()
    assert gone() is not None
    aiorpc.unregister("gone")
    aiorpc.unregister("kept")
    gc.collect()
    assert gone() is None
    assert kept() is not None
    assert await remote(rref).add(1) == 1
    looking = asyncio.create_task(aiorpc.lookup("gone", on="main"))
    aiorpc.register("gone", Node(5))  # the name is free
    assert await remote(await looking).add(1) == 6


async def test_what_cannot_be_registered() -> None:
    aiorpc.register("taken", Node())
    with pytest.raises(ValueError, match="the name 'taken' is taken"):
        aiorpc.register("taken", Node())
    with pytest.raises(TypeError, match="a name must be a str, got 3"):
        aiorpc.register(3, Node())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'unknown' is not registered; registered names: taken"):
        aiorpc.unregister("unknown")
    with pytest.raises(TypeError, match="a name must be a str, got 3"):
        await aiorpc.lookup(3, on="main")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no worker 'nobody'"):
        await aiorpc.lookup("taken", on="nobody")


class TestOutsideAWorld:
    """What a process in no world is told."""

    @pytest.fixture
    def world(self) -> None:
        """None here."""

    async def test_names_end_with_the_world(self) -> None:
        """The next world knows none of them."""
        async with world_of():
            aiorpc.register("node", Node())
        async with world_of():
            with pytest.raises(ValueError, match="registered names: none"):
                aiorpc.unregister("node")
            looking = asyncio.create_task(aiorpc.lookup("node", on="main"))
            aiorpc.register("node", Node(5))
            assert await remote(await looking).add(1) == 6

    async def test_not_serving(self) -> None:
        """Whatever is called; a group of an earlier world is refused."""
        async with world_of():
            group = await nodes()
        asks: list[Any] = [
            lambda: create([0], Node),
            lambda: aiorpc.lookup("node", on=0),
            lambda: remote(group).add(1),
            lambda: remote(group.any()).add(1),
            lambda: anext(group.map(Node.plain, [1])),
        ]
        for ask in asks:
            with pytest.raises((NotInWorld, RuntimeError)):
                await ask()
        with pytest.raises(NotInWorld):
            aiorpc.register("node", Node())
        assert repr(group)
        assert hash(group) == hash(Group([*group]))

    async def test_lookup_needs_no_export(self) -> None:
        """It is answered whatever `exports` says; other calls are not."""
        async with world_of(exports=[Node]):
            aiorpc.register("node", Node(1))
            found = await aiorpc.lookup("node", on="main")
            assert await remote(found).add(1) == 2
            group: Group[Any] = Group([found, await create("main", Node, 5)])
            assert await remote(group).add(1) == [3, 6]
            with pytest.raises(NotExported):
                await call("main", give_back, 1)
            with pytest.raises(GroupError) as raised:
                await call(group, give_back)
            assert [type(exc) for exc in raised.value.exceptions] == [NotExported] * 2
