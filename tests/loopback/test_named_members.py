"""Members by name, in a world of one: the object of this worker comes and goes."""

import asyncio
import copy
import threading
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    CallTimeout,
    Group,
    NoMembers,
    NotInWorld,
    WorkerLeft,
    call,
    each,
    fetch,
    members,
    register,
    remote,
    timeout,
    unregister,
)
from aiorpc_torch.testing import connection, drop_connection
from tests.support.registered import NAME, Env
from tests.support.two_ends import until

SOON = 30.0
pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.promise("members.follow")
async def test_the_object_of_this_worker() -> None:
    """It is a member as long as it is registered; calls are made by those that are there."""
    envs = members(NAME)
    assert [*envs] == []
    assert await remote(envs).add(1) == []
    waiting = asyncio.create_task(envs.wait())
    await asyncio.sleep(0)
    rref = register(NAME, Env("a"))
    await waiting
    assert [*envs] == [rref]
    assert rref in envs
    assert await remote(envs).add(each([1])) == ["a1"]
    assert await call(envs, Env.add, 2) == ["a2"]
    assert await remote(envs.any()).add(3) == "a3"
    assert [pair async for pair in remote(envs).add(4)] == [(rref, "a4")]
    assert await remote(Group(envs)).add(5) == ["a5"]
    unregister(NAME)
    await until(lambda: not envs)
    again = register(NAME, Env("b"))
    await until(lambda: [*envs] == [again])
    assert await remote(envs).add(1) == ["b1"]


@pytest.mark.promise("members.calls")
async def test_a_method_that_raises_what_a_refusal_raises() -> None:
    """It has run, so no other member is called."""
    one, other = Env(), Env()
    group: Group[Env] = Group([register(NAME, one), register("other", other)])
    with pytest.raises(NotInWorld, match="another worker has left"):
        await remote(group.any()).refuse(1)
    assert one.items + other.items == [1]


@pytest.mark.promise("members.calls")
async def test_a_call_is_made_by_those_at_its_start() -> None:
    """Not by those when it was written."""
    envs = members(NAME)
    pending = remote(envs).add(1)
    register(NAME, Env("a"))
    await envs.wait()
    assert await pending == ["a1"]


@pytest.mark.promise("members.ends")
async def test_nobody_is_there() -> None:
    """A call of any member names the group; a wait ends in time, with the number."""
    envs: aiorpc.types.NamedMembers[Env] = members("nobody")
    with pytest.raises(NoMembers, match="no member in <members 'nobody', 0 now>"):
        await remote(envs.any()).add(1)
    expected = "waited for 2 members 'nobody', there are 0"
    with pytest.raises(CallTimeout, match=expected) as late, timeout(0.1):
        await envs.wait(2)
    assert not late.value.may_have_run  # nothing was sent
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await envs.wait()
    with pytest.raises(CallTimeout), timeout(0.1):
        [item async for item in envs.map(Env.roll, [1])]


@pytest.mark.promise("members.map")
async def test_a_map_waits_for_members() -> None:
    """From the first one on, and while there is none; it ends once all items are done."""
    envs: aiorpc.types.NamedMembers[Env] = members(NAME)
    results = envs.map(Env.roll, range(6), in_flight=1)
    first = asyncio.create_task(anext(results))
    await asyncio.sleep(0.01)
    register(NAME, Env())
    async with asyncio.timeout(SOON):
        assert await first == 0
        unregister(NAME)
        await until(lambda: not envs)
        rest: Any = asyncio.create_task(_all(results))
        await asyncio.sleep(0.01)
        last = register(NAME, Env())
        assert await rest == [1, 2, 3, 4, 5]
    assert (await fetch(last)).items


@pytest.mark.promise("members.map")
@pytest.mark.parametrize("was_sent", [True, False])
async def test_items_of_a_member_that_leaves(was_sent: bool) -> None:
    """Its worker serves no more, and the change of the group follows: others get its items."""
    leaving, other = Env(), Env()
    other.items.append(-1)  # `stay` returns
    register(NAME, leaving)
    envs: aiorpc.types.NamedMembers[Env] = members(NAME)
    if was_sent:
        await remote(envs.any()).add(0)  # the connection is open
    results = asyncio.create_task(_all(envs.map(Env.stay, range(2), in_flight=1)))
    await until(lambda: leaving.items if was_sent else connection("main").pending)
    drop_connection("main", WorkerLeft("main"))
    assert leaving.items == [0] * was_sent
    unregister(NAME)
    register(NAME, other)
    async with asyncio.timeout(SOON):
        assert await results == [0, 1]


async def _all(results: Any) -> list[Any]:
    return [item async for item in results]


async def test_other_event_loops() -> None:
    """They share the view of this worker; a wait and a map there end as here."""
    register(NAME, Env("a"))
    found: list[Any] = []

    async def main() -> None:
        envs: aiorpc.types.NamedMembers[Env] = members(NAME)
        async with asyncio.timeout(SOON):
            await envs.wait()
            found.append(await remote(envs).add(1))
            found.append(await _all(envs.map(Env.roll, range(3))))

    thread = threading.Thread(target=asyncio.run, args=[main()])
    thread.start()
    await asyncio.to_thread(thread.join)
    assert found == [["a1"], [0, 1, 2]]


async def test_arguments() -> None:
    with pytest.raises(TypeError, match="a name must be a str"):
        members(5)  # type: ignore[arg-type]
    envs = members(NAME)
    with pytest.raises(TypeError, match=r"send Group\(members\), or the name"):
        copy.copy(envs)
    with pytest.raises(TypeError, match="at least one iterable"):
        envs.map(Env.roll)
    with pytest.raises(ValueError, match="in_flight"):
        envs.map(Env.roll, [1], in_flight=0)
    with pytest.raises(TypeError, match="got a Group"):
        aiorpc.proxy(envs)  # type: ignore[call-overload]
