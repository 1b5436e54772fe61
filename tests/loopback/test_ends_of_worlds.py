"""Ends of a world of one: in order, by an exception, with calls to itself pending, at its start."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aiorpc_torch import Group, NotInWorld, RRef, batched, create, members, remote
from aiorpc_torch.testing import Gate, world
from tests.support.fork_servers import torch_runs


@pytest.mark.parametrize("fails", [False, True])
async def test_torch_stops_though_a_call_to_itself_is_pending(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Time after time: the caller learns that the world is over, and torch's threads have ended."""
    for _ in range(10):
        try:
            async with world():
                gate = await create("main", Gate)
                waiting = asyncio.create_task(remote(gate).passed())
                await remote(gate).entered()
                if fails:
                    raise LookupError
        except LookupError:
            pass
        assert not torch_runs()
        with pytest.raises(NotInWorld):
            await waiting
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR], caplog.text


class Waiting:
    async def wait(self, item: int = 0) -> None:
        await asyncio.Event().wait()


async def consumed(items: AsyncIterator[Any]) -> None:
    async for _ in items:
        pass


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize(
    "kind",
    ["awaited", *(pytest.param(e, marks=pytest.mark.slow) for e in ("iterated", "mapped", "any"))],
)
async def test_a_call_of_a_group_that_is_cancelled_just_before_the_end(
    kind: str, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever forgets it then reads nothing in the log, whatever its members do meanwhile."""
    gc.collect()  # tasks that other tests have left
    caplog.clear()
    async with world():
        group = await create(["main", "main"], Waiting)
        calls: dict[str, Callable[[], Any]] = {
            "awaited": lambda: remote(group).wait(),
            "iterated": lambda: consumed(aiter(remote(group).wait())),
            "mapped": lambda: consumed(group.map(Waiting.wait, range(5))),
            "any": lambda: remote(group.any()).wait(),
        }
        calling = asyncio.ensure_future(calls[kind]())
        for _ in range(steps):
            await asyncio.sleep(0)
        calling.cancel()
    del calling
    gc.collect()
    await asyncio.sleep(0)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR], caplog.text


class Lingering:
    """Its batch takes a while to end, and meanwhile another one begins."""

    def __init__(self) -> None:
        self.began, self.cancelled, self.go = (asyncio.Event() for _ in range(3))
        self.ends = 0

    @batched(max_size=1)
    async def hold(self, items: list[int]) -> list[int]:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
            await self.go.wait()
        return items

    @batched(max_size=1)
    async def begin(self, items: list[int]) -> list[int]:
        self.go.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ends += 1
        return items


async def test_a_batch_that_begins_as_its_worker_leaves() -> None:
    """It ends, as those that have begun before."""
    lingering = Lingering()

    async def call_later(far: Any) -> None:
        await lingering.cancelled.wait()
        try:
            await far.begin(1)
        finally:
            lingering.go.set()

    async with world():
        far: Any = remote(RRef(lingering))
        calls = [asyncio.ensure_future(far.hold(0)), asyncio.create_task(call_later(far))]
        await lingering.began.wait()
    for each in calls:
        with pytest.raises(NotInWorld):
            await each
    assert lingering.ends == 1


async def test_a_call_by_no_members_after_the_world() -> None:
    """It raises: a loop of such calls would go on for ever."""
    async with world():
        envs = members("env")
        assert await remote(envs).step() == []
    for group in (envs, Group(())):
        with pytest.raises(NotInWorld, match="in no world"):
            await remote(group).step()


async def test_a_method_that_is_looked_up_on_an_rref() -> None:
    async def forgets_remote() -> None:
        async with world():
            gate: Any = await create("main", Gate)
            gate.entered()

    text = r"no attribute 'entered': write `await remote\(rref\)\.entered\(\)`"
    with pytest.raises(AttributeError, match=text):
        await forgets_remote()
