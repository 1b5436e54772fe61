"""Supervised objects in processes that are killed, replaced, frozen."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
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
    create,
    each,
    fetch,
    lookup,
    remote,
    supervised,
)
from aiorpc_torch.testing import frozen, world
from tests.support.supervised_objects import (
    Diary,
    Refused,
    awaiting,
    endless,
    lose,
    mortal,
    once,
    picky,
    registered,
)

LONG = 60.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "diary"


def told(file: Path) -> list[str]:
    return file.read_text().split()


async def lost(awaitable: Any) -> WorkerLost:
    with pytest.raises(WorkerLost) as raised:
        await awaitable
    return raised.value


@pytest.mark.promise("supervised.again", "supervised.waits")
async def test_calls_wait_for_the_next_incarnation(file: Path) -> None:
    """All kinds of calls, in their order; the object is made once for all of them."""
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        diary = await supervised("a", Diary, file, 5)
        assert await remote(diary).add() == 6
        pid, old = await remote(diary).pid(), diary.rref
        await lose("a")
        adding = [asyncio.create_task(remote(diary).add()) for _ in range(5)]
        reading = asyncio.create_task(read(remote(diary).count(2)))
        copying = asyncio.create_task(fetch(diary))
        await asyncio.sleep(0)
        assert diary.incarnation == 0
        assert not any(each.done() for each in adding)
        assert await call(diary, Diary.pid) != pid
        assert await asyncio.gather(*adding) == [6, 7, 8, 9, 10]
        assert await reading == [10, 11]
        assert isinstance(await copying, Diary)
        assert diary.incarnation == 1
        assert told(file) == ["made", "made", "count"]
        assert "this RRef belongs to its old process" in str(await lost(remote(old).add()))
        assert aiorpc.observe.stats().in_flight == 0


@pytest.mark.promise("supervised.again")
async def test_losses_that_no_call_of_the_object_has_seen(file: Path) -> None:
    """The next call of any kind finds the old RRef, and waits for the next incarnation."""
    async with world(["a"], max_restarts=5) as me, asyncio.timeout(LONG):
        diary = await supervised("a", Diary, file, 5)
        group = Group([diary])
        for incarnation, calling in enumerate(
            (
                lambda: remote(diary).add(),
                lambda: remote(group).add(),
                lambda: remote(group.any()).add(),
                lambda: read(remote(diary).count(1)),
                lambda: read(group.map(Diary.twice, [3])),
            ),
            1,
        ):
            await lose("a")
            await me.wait_for("a")
            assert await calling() in (6, [6], [5])
            assert diary.incarnation == incarnation


@pytest.mark.promise("supervised.again")
async def test_it_is_made_again_without_a_call(file: Path) -> None:
    """So a name that the factory registers is there again for all."""
    async with world(["a"], max_restarts=1) as me, asyncio.timeout(LONG):
        diary = await supervised("a", registered, file)
        await lose("a")
        await me.wait_for("a")
        found = await lookup("diary", on="a")
        assert await remote(found).add() == 1
        assert await remote(diary).add() == 2  # now its supervisor has the factory's answer
        assert diary.incarnation == 1


async def read(stream: Any) -> list[Any]:
    return [item async for item in stream]


@pytest.mark.promise("supervised.once")
async def test_a_call_under_way_is_not_repeated(file: Path) -> None:
    """Awaited, streamed, by a group: WorkerLost, and it has run once."""
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        diary = await supervised("a", Diary, file)
        group = Group([diary])
        pending = [
            asyncio.create_task(each)
            for each in (wait(remote(diary).hang()), wait(remote(group).hang()))
        ]
        stream: Any = aiter(remote(diary).count(10**9))
        assert await anext(stream) == 0
        await lose("a")
        error = await lost(pending[0])
        assert (error.worker, error.method, error.may_have_run) == ("a", "Diary.hang", True)
        with pytest.raises(GroupError) as raised:
            await pending[1]
        [member] = raised.value.exceptions
        assert isinstance(member, WorkerLost)
        assert member.may_have_run
        await lost(read(stream))
        assert await remote(diary).add() == 1
        assert sorted(told(file)) == ["count", "hang", "hang", "made", "made"]


async def wait(awaitable: Any) -> Any:
    return await awaitable


@pytest.mark.promise("supervised.waits")
async def test_deadlines_and_cancellations_of_waiting_calls(file: Path) -> None:
    """A worker that is silent is not replaced: its object goes on, with its state."""
    async with (
        world(["a"], heartbeat=1.0, transports=["uv"], max_restarts=1),
        asyncio.timeout(LONG),
    ):
        diary = await supervised("a", Diary, file)
        pending = asyncio.create_task(wait(remote(diary).hang()))
        assert await remote(diary).add() == 1
        assert await remote(diary).add(0) == 1  # behind `hang`, which has begun therefore
        with frozen("a"):
            assert (await lost(pending)).may_have_run
            await late(remote(diary, timeout=0.05).add())
            await late(read(remote(diary, timeout=0.05).count(1)))
            with aiorpc.timeout(0.05):
                await late(remote(diary).add())
                await late(remote(Group([diary]).any()).add())
            with pytest.raises(GroupError) as raised:
                await remote(Group([diary]), timeout=0.05).add()
            check_late(raised.value.exceptions[0])
            with aiorpc.timeout(0.05), pytest.raises(CallTimeout):
                await read(Group([diary]).map(Diary.twice, [1]))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(remote(diary).add(), 0.05)
            with anyio.move_on_after(0.05) as scope:
                await remote(diary).add()
            assert scope.cancelled_caught
            cancelled = asyncio.create_task(wait(remote(Group([diary])).add()))
            mapped = asyncio.create_task(read(Group([diary]).map(Diary.twice, [1, 2])))
            waiting = asyncio.create_task(wait(remote(diary).add()))
            await asyncio.sleep(0)
            for each in (cancelled, mapped):
                each.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await each
            assert aiorpc.observe.stats().in_flight == 0
            assert not waiting.done()
        assert await waiting == 2, "the calls that were late have not run"
        assert (diary.incarnation, told(file)) == (0, ["made", "hang"])


async def late(awaitable: Any) -> None:
    with pytest.raises(CallTimeout, match="that worker was awaited") as raised:
        await awaitable
    check_late(raised.value)


def check_late(error: BaseException) -> None:
    assert isinstance(error, CallTimeout)
    assert (error.worker, error.may_have_run) == ("a", False)


@pytest.mark.promise("supervised.restarts")
async def test_it_is_made_as_often_as_its_process_comes_back(file: Path) -> None:
    """The budget is that of the world; `restarts` of the worker counts with the incarnations."""
    async with world(["a"], max_restarts=5), asyncio.timeout(LONG):
        diary = await supervised("a", Diary, file)
        for incarnation in range(1, 6):
            await lose("a")
            assert await remote(diary).add() == 1
            assert diary.incarnation == incarnation
        await lose("a")
        error = await lost(remote(diary).add())
        assert "it is not restarted" in error.reason


@pytest.mark.promise("supervised.restarts")
async def test_a_child_that_nobody_restarts_is_refused() -> None:
    """At once, with the remedy; an object of this process itself needs no restart."""
    async with world(["a", "b"]) as me:
        for to in ("a", 1, ["a", "b"], (me.name, "b")):
            with pytest.raises(ValueError, match=r"local_world\(\) or run_local\(\) max_restarts="):
                await supervised(to, dict)
        assert await remote(await supervised(me.name, dict)).copy() == {}
        with pytest.raises(ValueError, match="worker 'b' is not restarted when it dies"):
            await call("a", supervise, "b")


async def supervise(worker: str) -> None:
    await supervised(worker, dict)


@pytest.mark.promise("supervised.restarts")
async def test_a_worker_that_is_not_started_again(file: Path) -> None:
    """The calls that wait for it raise WorkerLost."""
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        diary = await supervised("a", Diary, file)
        await lose("a")
        assert await remote(diary).add() == 1
        await lose("a")
        for _ in range(2):
            error = await lost(remote(diary).add())
            assert (error.worker, error.may_have_run) == ("a", False)


@pytest.mark.promise("supervised.factory")
async def test_a_factory_that_raises(file: Path, tmp_path: Path) -> None:
    """The calls that wait raise its exception. The next one tries again."""
    refusal = tmp_path / "refusal"
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        diary = await supervised("a", picky, file, refusal)
        refusal.touch()
        await lose("a")
        calls: list[Any] = [remote(diary).add(), read(remote(diary).count(1)), fetch(diary)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [repr(each) for each in found] == ["LookupError('refused')"] * 3
        assert len({*map(id, found)}) == 3, "one for each caller"
        with pytest.raises(GroupError) as raised:
            await remote(Group([diary])).add()
        assert isinstance(raised.value.exceptions[0], LookupError)
        with pytest.raises(LookupError):
            await read(Group([diary]).map(Diary.twice, [1]))
        refusal.unlink()
        assert await remote(diary).add() == 1
        assert diary.incarnation == 1


async def test_a_process_that_is_lost_while_it_makes_the_object(file: Path, tmp_path: Path) -> None:
    """It is made in the next one."""
    refusal = tmp_path / "refusal"
    async with world(["a"], max_restarts=2), asyncio.timeout(LONG):
        diary = await supervised("a", mortal, file, refusal)
        refusal.touch()
        await lose("a")
        assert await remote(diary).add() == 1
        assert (diary.incarnation, told(file)) == (1, ["made"] * 2)


@pytest.mark.promise("supervised.groups")
async def test_groups(file: Path) -> None:
    """Calls of all members wait for those that are lost; `any` and `map` use the others."""
    async with world(["a", "b"], max_restarts=4), asyncio.timeout(LONG):
        group = await supervised(["a", "b"], Diary, file, each([1, 2]))
        await lose("a")
        assert await remote(group.any()).add(0) == 2, "the member that is alive"
        assert await remote(group).add(each([10, 20])) == [11, 22]
        await lose("a")
        pairs = {result async for _, result in remote(group).add(0)}
        assert pairs == {1, 22}
        await asyncio.gather(lose("a"), lose("b"))
        assert await asyncio.gather(*(remote(group.any()).twice(n) for n in range(4))) == [
            0,
            2,
            4,
            6,
        ]
        await lose("b")
        items = [*range(40)]
        assert await read(group.map(Diary.twice, items)) == [2 * item for item in items]


async def test_a_map_goes_on_when_its_members_are_back(file: Path) -> None:
    """An item that was lost runs again, on the next incarnation, at most `retries` times."""
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        diary = await supervised("a", Diary, file)
        results = Group([diary]).map(Diary.twice, range(10), in_flight=1)
        assert await anext(results) == 0
        await lose("a")
        assert await read(results) == [*range(2, 20, 2)]
        assert diary.incarnation == 1


async def test_a_group_call_that_is_cancelled_before_its_member_is_made_again(file: Path) -> None:
    """It is not sent afterwards."""
    async with world(["a"], max_restarts=1) as me, asyncio.timeout(LONG):
        diary = await supervised("a", Diary, file)
        await lose("a")
        await me.wait_for("a")
        calling = remote(Group([diary])).hang()
        calling.send(None)  # finds the loss, and handles it in the next iteration
        calling.close()
        assert await remote(diary).add() == 1
        assert await remote(diary).add() == 2
        assert told(file) == ["made", "made"]


async def test_the_end_of_the_loop_that_supervises(file: Path) -> None:
    """Calls go on while the object is alive. It is not made again."""
    async with world(["a"], max_restarts=1) as me, asyncio.timeout(LONG):
        diary = await asyncio.to_thread(lambda: asyncio.run(supervised("a", Diary, file)))
        assert await remote(diary).add() == 1
        await lose("a")
        await me.wait_for("a")
        for _ in range(2):
            with pytest.raises(NotInWorld, match="the event loop that made <supervised Diary"):
                await remote(diary).add()


async def test_a_recovery_that_other_code_cancels(file: Path) -> None:
    """Before its first step: the next call begins another one."""
    loop, cancelled = asyncio.get_running_loop(), list[Any]()

    def make(
        loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> "asyncio.Task[Any]":
        task = asyncio.Task(coroutine, loop=loop, **options)
        if coroutine.__name__ == "_recover" and not cancelled:
            cancelled.append(task)
            task.cancel()
        return task

    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        diary = await supervised("a", Diary, file)
        loop.set_task_factory(make)  # type: ignore[arg-type]
        try:
            await lose("a")
            while not cancelled:  # noqa: ASYNC110 - the loss is known some time later
                await asyncio.sleep(0.01)
        finally:
            loop.set_task_factory(None)
        await asyncio.sleep(0)
        assert await remote(diary).add() == 1


async def test_a_stream_that_is_closed_while_it_waits(file: Path) -> None:
    """It is not sent afterwards."""
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        diary = await supervised("a", Diary, file)
        await lose("a")
        stream: Any = aiter(remote(diary).count(3))
        reading = asyncio.create_task(wait(anext(stream, "closed")))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task waits"):
            await anext(stream)
        await stream.aclose()
        assert await reading == "closed"
        assert await remote(diary).add() == 1
        assert told(file) == ["made", "made"]


async def test_loops_of_other_threads(file: Path) -> None:
    """Their calls wait too. The object is made on the loop that supervises it."""
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        diary = await supervised("a", Diary, file)
        await lose("a")
        found = await asyncio.to_thread(lambda: asyncio.run(wait(remote(diary).add())))
        assert found == 1
        assert await remote(diary).add() == 2


@pytest.mark.promise("supervised.factory")
async def test_a_factory_that_raises_no_exception(tmp_path: Path) -> None:
    """Groups and maps end with it, as lone calls do."""
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        objects = [await supervised("a", once, tmp_path / str(number)) for number in range(2)]
        await lose("a")
        with pytest.raises(GroupError, match="1 of 1 members failed"):
            await remote(Group(objects[:1])).pid()
        with pytest.raises(Refused):
            async for _ in Group(objects[1:]).map(Diary.twice, [1, 2]):
                pass


@pytest.mark.promise("supervised.left", "joining.left")
async def test_objects_that_are_made_while_their_worker_leaves(file: Path, tmp_path: Path) -> None:
    """The calls that make them have run, and the objects are gone with the worker."""
    go = tmp_path / "go"
    async with world(["a"], max_restarts=1) as me, asyncio.timeout(LONG):
        diary = await supervised("a", awaiting, file, go)
        await me.restart("a")
        calls: list[Any] = [remote(diary).add(), create("a", awaiting, file, go)]
        calls.append(create(["a"], awaiting, file, go))
        making = [asyncio.ensure_future(each) for each in calls]
        while len(told(file)) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stopping = asyncio.ensure_future(me.stop("a"))
        while me.peers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        go.touch()
        found = await asyncio.gather(*making, return_exceptions=True)
        for exc in (*found[:2], *found[2].exceptions):  # type: ignore[union-attr]
            assert isinstance(exc, WorkerLeft), exc
            assert exc.may_have_run
            assert (exc.worker, exc.method) == ("a", "awaiting")
        await stopping
        await me.start("a")
        assert await remote(diary).add() == 1


async def test_a_stream_that_is_closed_while_its_object_is_awaited(file: Path) -> None:
    async with world(["a"], max_restarts=1), asyncio.timeout(LONG):
        diary = remote(await supervised("a", endless, file))
        assert await diary.add() == 1
        await lose("a")
        items = aiter(diary.count(3))
        waiting = asyncio.ensure_future(anext(items, "closed"))
        await asyncio.sleep(0.1)
        await items.aclose()
        assert await waiting == "closed"
