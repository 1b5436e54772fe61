"""Ends of a world of one: in order, by an exception, with calls to itself pending, at its start."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import Group, NotInWorld, RRef, batched, create, members, remote
from aiorpc_torch._torch.agent import Agent, is_running
from aiorpc_torch._world import startup
from aiorpc_torch._world.config import WorkerConfig
from aiorpc_torch._world.directory_client import DirectoryClient
from aiorpc_torch._world.meeting import Meeting
from aiorpc_torch.testing import Gate, world


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
        assert not is_running()
        with pytest.raises(NotInWorld):
            await waiting
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR], caplog.text


@dataclass
class SlowStart:
    """A start of torch that has begun, and goes on when it is told."""

    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def agent(self, *args: Any, **options: Any) -> Agent:
        self.begun.set()
        assert self.go.wait(30.0)
        return Agent(*args, **options)


@pytest.fixture
def slow_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStart]:
    found = SlowStart()
    monkeypatch.setattr(startup, "Agent", found.agent)
    yield found
    found.go.set()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("how", ["task", "again and again", "scope"])
async def test_a_cancelled_start_leaves_no_agent(
    slow_start: SlowStart, tmp_path: Path, how: str, size: int
) -> None:
    """It ends once torch has started and was stopped; the next world may begin."""
    meeting, scope = f"file://{tmp_path / 'store'}", anyio.CancelScope()

    async def start() -> None:
        with scope:
            async with aiorpc.worker(
                "main", init_method=meeting, rank=0, world_size=size, start_timeout=30.0
            ):
                raise AssertionError

    starting = asyncio.create_task(start())
    if size > 1:
        registration = WorkerConfig("b", 1, size, meeting).registration()
        other = DirectoryClient(Meeting(meeting), registration, 30.0)
        registering = asyncio.create_task(other.register())
    await asyncio.to_thread(slow_start.begun.wait)
    cancel: Callable[[], object] = scope.cancel if how == "scope" else starting.cancel
    for _ in range(3 if how == "again and again" else 1):
        cancel()
        await asyncio.sleep(0)
    slow_start.go.set()
    await asyncio.wait((starting,))
    assert starting.cancelled() or how == "scope"
    assert not is_running()
    if size > 1:
        await registering
        await other.close()
    async with world():
        assert is_running()


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

    with pytest.raises(AttributeError, match="no attribute 'entered'") as error:
        await forgets_remote()
    assert "write `await remote(rref).entered()`" in "".join(error.value.__notes__)
