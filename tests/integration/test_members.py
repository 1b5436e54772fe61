"""Members by name in worlds that change: workers join, leave, die, are replaced and return."""

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import psutil
import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    CallTimeout,
    Group,
    GroupError,
    NotInWorld,
    WorkerLeft,
    WorkerLost,
    call,
    each,
    members,
    remote,
)
from aiorpc_torch.testing import kill, world
from tests.support import joiners
from tests.support.registered import NAME, Env, enlist, resign
from tests.support.two_ends import until

SOON = 60.0


async def pids(envs: Any) -> list[int]:
    """The processes of all members."""
    return await remote(envs).pid()  # type: ignore[no-any-return]


@pytest.mark.promise("members.known")
async def test_a_worker_that_is_lost_meanwhile() -> None:
    """It is not waited for any longer."""
    async with asyncio.timeout(2 * SOON), world(["a", "b"], heartbeat=2.0):
        await call("a", enlist, "a")
        frozen = psutil.Process(await call("b", os.getpid))
        frozen.suspend()
        try:
            assert len(await members(NAME)) == 1
        finally:
            frozen.resume()


async def count_elsewhere(name: str, count: int) -> list[int]:
    """Wait here for so many members; return their processes."""
    envs = members(name)
    await envs.wait(count)
    return await pids(envs)


async def count_now(name: str) -> int:
    """The members right after the `await`, at a worker that has asked for none before."""
    return len(await members(name))


@pytest.mark.promise("members.known")
async def test_all_are_known_after_the_await() -> None:
    """At every worker, also with some that have none; a lost worker is not waited for."""
    async with asyncio.timeout(2 * SOON), world(["a", "b", "c"], heartbeat=2.0) as me:
        assert len(await members(NAME)) == 0
        await asyncio.gather(*(call(each, enlist, each) for each in "ab"))
        assert await call(["a", "b", "c"], count_now, NAME) == [2, 2, 2]
        assert await count_now(NAME) == 2
        await me.start("d")
        assert await call("d", count_now, NAME) == 2
        kill("a")
        assert await call("c", count_now, "another name") == 0
        envs = await members(NAME)
        await until(lambda: len(envs) == 1)
        with aiorpc.timeout(0.0), pytest.raises(CallTimeout, match="all workers to tell of"):
            await members("a third name")


@pytest.mark.promise("members.follow")
async def test_workers_come_and_go() -> None:
    """In rank order, at every worker; with another object under the name, too."""
    async with asyncio.timeout(2 * SOON), world(["a"]) as me:
        envs: aiorpc.types.NamedMembers[Env] = members(NAME)
        first = await call("a", enlist, "a")
        await envs.wait()
        await asyncio.gather(me.start("b"), me.start("c"))
        late, early = await call("c", enlist, "c"), await call("b", enlist, "b")
        await envs.wait(3)
        ranks = {name: rank for rank, name in enumerate(me.peers)}
        expected = [first, *([early, late] if ranks["b"] < ranks["c"] else [late, early])]
        assert await pids(envs) == expected
        assert await call("b", count_elsewhere, NAME, 3) == expected
        assert await remote(envs).add(each([1, 2, 3])) in (["a1", "b2", "c3"], ["a1", "c2", "b3"])
        await me.stop("b")
        await until(lambda: len(envs) == 2)
        assert await pids(envs) == [first, late]
        await call("c", resign)
        await until(lambda: len(envs) == 1)
        await call("c", enlist, "again")
        await envs.wait(2)
        assert await remote(envs).add(5) == ["a5", "again5"]


async def add_unaware() -> list[str]:
    """Call any of those members, in tasks too, and by a map."""
    [envs] = joiners.kept
    group: Group[Env] = Group(envs)
    results = [await remote(group.any()).add(value) for value in range(3)]
    results += await asyncio.gather(*(remote(group.any()).add(value) for value in range(3)))
    results += [result async for result in group.map(Env.add, range(3))]
    with pytest.raises(WorkerLeft, match="worker 'b' has left its world; add was not sent"):
        await remote(Group(envs[:1]).any()).add(1)
    return results


@pytest.mark.promise("joining.retire")
async def test_a_worker_that_leaves_while_its_calls_run() -> None:
    """None of the members any more, at any worker; others get the calls of any member."""
    async with asyncio.timeout(2 * SOON), world(["a", "c"]) as me:
        envs: aiorpc.types.NamedMembers[Env] = members(NAME)
        await me.start("b")
        for name in ("b", "a"):
            await call(name, enlist, name)
        await envs.wait(2)
        both = sorted(envs, key=lambda env: env.owner_name(), reverse=True)
        await call("c", joiners.keep_unaware, both)
        running = asyncio.ensure_future(_gather(remote(both[0]).stay(1)))
        await until_busy(Group(both[:1]), 1)
        stopping = asyncio.create_task(me.stop("b"))
        await until(lambda: len(envs) == 1)
        assert me.peers == ("a", "c")
        assert [await remote(envs.any()).add(value) for value in range(3)] == ["a0", "a1", "a2"]
        assert [result async for result in envs.map(Env.add, range(3))] == ["a0", "a1", "a2"]
        assert await call("c", add_unaware) == ["a0", "a1", "a2"] * 3
        with pytest.raises(WorkerLeft, match="worker 'b' has left its world"):
            await remote(both[0]).add(1)
        assert not stopping.done()
        running.cancel()
        await stopping


@pytest.mark.promise("members.follow")
async def test_a_process_that_is_replaced() -> None:
    """A dead member is gone at once, and there again once its replacement registers."""
    async with asyncio.timeout(2 * SOON), world(["a", "b"], max_restarts=1) as me:
        envs: aiorpc.types.NamedMembers[Env] = members(NAME)
        for name in me.peers:
            await call(name, enlist, name)
        await envs.wait(2)
        pending = asyncio.create_task(call("a", asyncio.sleep, 600))
        kill("a")
        with pytest.raises(WorkerLost):
            await pending
        assert len(envs) == 1
        assert await remote(envs).add(1) == ["b1"]
        await me.wait_for("a")
        assert len(envs) == 1
        await call("a", enlist, "new")
        await envs.wait(2)
        assert await remote(envs).add(2) == ["new2", "b2"]
        assert len(await call("b", count_elsewhere, NAME, 2)) == 2


@pytest.mark.promise("members.follow")
async def test_a_member_that_is_frozen() -> None:
    """It is none while it is lost, and the same one again once it answers."""
    async with asyncio.timeout(2 * SOON), world(["a"], heartbeat=2.0) as me:
        envs: aiorpc.types.NamedMembers[Env] = members(NAME)
        pid = await call("a", enlist, "a")
        await envs.wait()
        [before] = envs
        pending = asyncio.create_task(call("a", asyncio.sleep, 600))
        psutil.Process(pid).send_signal(signal.SIGSTOP)
        with pytest.raises(WorkerLost):
            await pending
        assert not envs
        psutil.Process(pid).send_signal(signal.SIGCONT)
        await me.wait_for("a")
        await envs.wait()
        assert aiorpc.Group(envs) == aiorpc.Group([before])
        assert await remote(envs).add(1) == ["a1"]


@pytest.mark.promise("members.map")
async def test_a_map_takes_in_workers_that_join() -> None:
    """They get items; those of a member that dies go to others; every item is there once."""
    async with asyncio.timeout(2 * SOON), world(["a", "b"]) as me:
        envs: aiorpc.types.NamedMembers[Env] = members(NAME)
        for name in me.peers:
            await call(name, enlist, name)
        await envs.wait(2)
        collecting: Any = asyncio.create_task(_all(envs.map(Env.stay, range(40), in_flight=1)))
        await until_busy(envs, 2)
        await me.start("c")
        kill("a")
        await call("c", _enlist_quick)
        kill("b")
        assert await collecting == [*range(40)]
        assert await remote(envs).count() == [41]


async def until_busy(envs: Any, count: int) -> None:
    """Wait until so many members have an item that stays."""
    while sum(await remote(envs).count()) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def _all(results: Any) -> list[Any]:
    return [item async for item in results]


@pytest.mark.promise("members.map")
async def test_items_of_lost_members_are_done_once() -> None:
    """By members that come later, while there is none at all."""
    async with asyncio.timeout(2 * SOON), world(["a"]) as me:
        envs: aiorpc.types.NamedMembers[Env] = members(NAME)
        await call("a", enlist)
        await envs.wait()
        collecting: Any = asyncio.create_task(_all(envs.map(Env.stay, range(8), in_flight=2)))
        await until_busy(envs, 1)
        kill("a")
        await until(lambda: not envs)
        await me.start("b")
        assert not collecting.done()
        await call("b", _enlist_quick)
        assert Counter(await collecting) == Counter(range(8))


async def _enlist_quick() -> None:
    env = Env()
    env.items.append(-1)  # none of its items is its first
    aiorpc.register(NAME, env)


@pytest.mark.promise("members.ends")
async def test_the_end_of_a_world() -> None:
    """Whatever waits for members ends with NotInWorld."""
    async with world(["a"]):
        envs: aiorpc.types.NamedMembers[Env] = members(NAME)
        waiting = asyncio.create_task(envs.wait(1))
        mapping = asyncio.create_task(_all(envs.map(Env.roll, [1])))
        await call("a", asyncio.sleep, 0)
    for each_wait in (waiting, mapping):
        with pytest.raises(NotInWorld):
            await each_wait
    assert not envs
    with pytest.raises(NotInWorld):
        await remote(envs.any()).add(1)


async def test_workers_that_export_little() -> None:
    """They answer which objects they have, and tell what changes."""
    async with asyncio.timeout(SOON), world(["a"], exports=[enlist, resign, Env]):
        envs: aiorpc.types.NamedMembers[Env] = members(NAME)
        await call("a", enlist, "a")
        await envs.wait()
        assert await remote(envs).add(1) == ["a1"]
        await call("a", resign)
        await until(lambda: not envs)


async def test_a_member_that_dies_during_a_call() -> None:
    """The call of all fails for it alone."""
    async with asyncio.timeout(SOON), world(["a", "b"]) as me:
        envs: aiorpc.types.NamedMembers[Env] = members(NAME)
        for name in me.peers:
            await call(name, enlist, name)
        await envs.wait(2)
        pending = asyncio.create_task(_gather(remote(envs).stay(1)))
        await until_busy(envs, 2)
        kill("a")
        await until(lambda: len(envs) == 1)
        pending.cancel()
        with pytest.raises((asyncio.CancelledError, GroupError)):
            await pending


async def _gather(pending: Any) -> Any:
    return await pending
