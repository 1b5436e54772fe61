"""A start that is cancelled while torch starts."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch._directory.meeting import Meeting
from aiorpc_torch._node.config import WorkerConfig
from aiorpc_torch._torch.agent import Agent, is_running
from aiorpc_torch._world import startup
from aiorpc_torch._world.directory_client import DirectoryClient
from aiorpc_torch.testing import world


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
