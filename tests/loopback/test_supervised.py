"""Supervised objects that are alive: they are called as an RRef is."""

import asyncio
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, WorkerLost, call, create, each, fetch, proxy, remote, supervised
from aiorpc_torch.types import RemoteTraceback, Worker
from tests.support.actors import Counter
from tests.support.slack import SLACK
from tests.support.supervised_objects import Diary

pytestmark = pytest.mark.usefixtures("world")


async def test_it_is_called_as_an_rref() -> None:
    """Awaited, streamed, as a group's member, in order."""
    counter = await supervised(0, Counter, start=5)
    assert await remote(counter).add(1) == 6
    assert await call(counter, Counter.aadd, 1) == 7
    assert await proxy(counter).aadd(1) == 8
    assert (await fetch(counter)).value == 8
    assert (counter.incarnation, await remote(counter.rref).add(0)) == (0, 8)
    found = await asyncio.gather(*(remote(counter).aadd(1) for _ in range(20)))
    assert found == [*range(9, 29)]
    assert {"add", "scale"} <= {*dir(remote(counter))}
    with pytest.raises(AttributeError, match="'_secret' is private"):
        await remote(counter)._secret()
    with pytest.raises(TypeError, match="'begin'") as raised:
        await supervised(0, Counter, start=1, begin=2)
    assert isinstance(raised.value.__cause__, RemoteTraceback)


async def test_streams(tmp_path: Path) -> None:
    diary = await supervised(0, Diary, tmp_path / "diary", 10)
    assert [item async for item in remote(diary).count(3)] == [10, 11, 12]
    stream: Any = aiter(call(diary, Diary.count, 3))
    assert await anext(stream) == 10
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    unread: Any = aiter(remote(diary).count(3))
    await unread.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(unread)


async def test_a_call_is_used_once() -> None:
    counter = await supervised(0, Counter)
    adding = remote(counter).aadd(1)
    assert await adding == 1
    with pytest.raises(RuntimeError, match="awaited already"):
        await adding
    with pytest.raises(RuntimeError, match="awaited already"):
        aiter(adding)


async def test_groups() -> None:
    """Also beside an RRef; `each` gives each member its own arguments."""
    group = await supervised([0, 0], Counter, each([1, 2]))
    assert await remote(group).add(each([10, 20])) == [11, 22]
    mixed = Group([*group, await create(0, Counter, 3)])
    assert await call(mixed, Counter.add, 0) == [11, 22, 3]
    assert sorted([result async for _, result in remote(mixed).add(0)]) == [3, 11, 22]
    assert [found async for found in mixed.map(Counter.aadd, [0] * 3)] == [11, 22, 3]
    turns = [await remote(mixed.any()).aadd(0) for _ in range(3)]
    assert sorted(turns) == [3, 11, 22]
    assert Group([*group]) == group != mixed
    assert repr(group).startswith("<Group of 2 on ")


async def test_it_stays_in_its_process() -> None:
    counter = await supervised(0, Counter)
    with pytest.raises(TypeError, match=r"<supervised Counter on .*> belongs to this process"):
        pickle.dumps(counter)
    with pytest.raises(TypeError, match=r"send its \.rref"):
        await call(0, str, counter)


async def test_what_is_refused() -> None:
    untyped: Any = supervised
    with pytest.raises(TypeError, match="restarts") as raised:
        await untyped(0, Counter, restarts=3)
    assert "max_restarts= of the world" in raised.value.__notes__[-1]
    with pytest.raises(TypeError, match="the factory of supervised"):
        await untyped(0, 3)
    with pytest.raises(ValueError, match="no worker 'b' in this world"):
        await supervised("b", Counter)
    for to in (await create(0, Counter), iter(["main"]), {"main"}, None):
        with pytest.raises(TypeError, match="takes a worker, or a list or tuple of workers"):
            await untyped(to, Counter)


@pytest.mark.promise("supervised.once")
async def test_a_loss_that_a_method_reports_is_no_loss_of_the_object(
    world: Worker, tmp_path: Path
) -> None:
    """The method's own WorkerLost, even of the same worker, is an exception like any other."""
    diary = await supervised(0, Diary, tmp_path / "diary")
    for calling in (
        lambda: remote(diary).lose(world.name),
        lambda: remote(Group([diary]).any()).lose(world.name),
    ):
        with pytest.raises(WorkerLost) as raised:
            await calling()
        assert not raised.value.may_have_run
    with pytest.raises(aiorpc.GroupError):
        await remote(Group([diary])).lose(world.name)
    assert (tmp_path / "diary").read_text().split() == ["made", *["lose"] * 3]


async def test_nothing_else_keeps_it() -> None:
    """Also after calls. So its object ends with it, as with an RRef."""
    counter = await supervised(0, Counter)
    await asyncio.gather(*(remote(counter).aadd() for _ in range(3)))
    found = weakref.ref(counter)
    await call(0, int)  # the last call of a connection is kept until the next
    del counter
    gc.collect()
    assert found() is None


class Reporting:
    """Batches in which a call of another worker was lost."""

    def __init__(self) -> None:
        self.runs = 0

    @aiorpc.batched(max_size=4)
    async def raises(self, items: list[int]) -> list[int]:
        self.runs += 1
        raise WorkerLost("main", "a nested call", may_have_run=False)

    @aiorpc.batched(max_size=4)
    async def returns(self, items: list[int]) -> list[Any]:
        self.runs += 1
        return [WorkerLost("main", "a nested call", may_have_run=False) for _ in items]

    def ran(self) -> int:
        return self.runs


@pytest.mark.promise("supervised.once")
@pytest.mark.parametrize("method", ["raises", "returns"])
async def test_a_loss_that_a_batch_reports_is_no_loss_of_the_object(method: str) -> None:
    """Batched methods run once too, with retries and as one of several members."""
    made = await supervised(0, Reporting)
    for target in (made, made.rref, Group([made]).any()):
        begun = await remote(made).ran()
        handle: Any = remote(target, retries=2)  # type: ignore[call-overload]
        with pytest.raises(WorkerLost) as raised:
            await getattr(handle, method)(1)
        assert isinstance(raised.value.__cause__, RemoteTraceback)
        assert await remote(made).ran() == begun + 1


async def test_a_map_beside_a_call_that_does_not_start() -> None:
    """A call of another event loop has waited for the object too, and that loop stands."""
    counter = await supervised(0, Counter)
    waits, gate = threading.Event(), threading.Event()

    async def call_and_stand() -> int:
        adding = asyncio.ensure_future(remote(counter).aadd(1))
        while not counter._supervision._waiting:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        waits.set()
        gate.wait()  # the loop stands
        return await adding

    counter._lose(counter.rref)  # calls wait until it is known that its process is the same
    with ThreadPoolExecutor() as pool:
        added = pool.submit(asyncio.run, call_and_stand())
        try:
            assert waits.wait(SLACK)  # this loop stands too: it would make the object at once
            async with asyncio.timeout(SLACK):
                found = Group([counter]).map(Counter.aadd, [0] * 20, in_flight=2)
                assert [value async for value in found] == [0] * 20
        finally:
            gate.set()
        assert await asyncio.wrap_future(added) == 1
    assert counter._start() is counter.rref
