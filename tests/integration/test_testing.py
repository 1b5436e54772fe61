"""`aiorpc_torch.testing` with processes: gates, forkserver children, faults, leaks."""

import asyncio
import contextlib
import gc
import os
from typing import Any

import psutil
import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, WorkerLost, call, create, remote, testing
from aiorpc_torch.testing import Gate, Workers, frozen, kill, leaks, no_leaks
from tests.support import actors


class Clerk:
    """Works only when its gate is open."""

    def __init__(self, gate: RRef[Gate]) -> None:
        self.gate = gate

    async def work(self) -> str:
        await remote(self.gate).passed()
        return "done"


@pytest.mark.promise("testing.gate")
async def test_a_gate_across_processes(workers: Workers) -> None:
    """An actor on one worker stands at a gate on another, and the test sees it there."""
    await workers(["a", "b"])
    gate = await create("a", Gate)
    clerk = await create("b", Clerk, gate)
    working = asyncio.create_task(remote(clerk).work())
    assert await remote(gate).entered() == 1
    assert not working.done()
    await remote(gate).open()
    assert await working == "done"


def what_is_seen() -> tuple[str | None, str, str]:
    return os.environ.get("AIORPC_TEST"), os.getcwd(), os.environ["PATH"]


@pytest.mark.promise("testing.fresh")
async def test_forkserver_children_are_fresh(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share nothing with earlier ones, and have the current environment of this process."""
    pids = set()
    for number in range(2):
        monkeypatch.setenv("AIORPC_TEST", str(number))
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        async with testing.world(["a"]):
            assert await call("a", actors.bump_global) == 1
            assert await call("a", what_is_seen) == what_is_seen()
            pids.add(await call("a", actors.pid))
    assert len(pids) == 2


# ── faults ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("lost.dead", "testing.faults")
async def test_a_worker_that_is_killed(workers: Workers) -> None:
    """Its callers get WorkerLost; a second kill raises."""
    await workers(["a", "b"])
    gate = await create("a", Gate)
    waiting = asyncio.create_task(remote(gate).passed())
    await remote(gate).entered()
    pid = await call("a", actors.pid)
    kill("a")
    assert not psutil.pid_exists(pid)
    with pytest.raises(WorkerLost, match="'a' is lost"):
        await waiting
    with pytest.raises(ValueError, match="'a' is not a child process of this one; its children: b"):
        kill("a")
    with frozen("b"):
        kill("b")  # also one that is frozen


@pytest.mark.promise("testing.faults")
async def test_a_worker_that_is_frozen(workers: Workers) -> None:
    """It answers once it is thawed, also by an exception, and nothing is lost."""
    await workers(["a"], transports=["uv"])
    pid = await call("a", actors.pid)
    with pytest.raises(LookupError), frozen("a"):  # noqa: PT012
        asked = asyncio.create_task(call("a", actors.pid))
        with pytest.raises(aiorpc.CallTimeout), aiorpc.timeout(0.2):
            await call("a", actors.pid)
        assert not asked.done()
        raise LookupError("in the block")
    assert await asked == pid


async def test_a_world_that_ends_while_a_worker_is_frozen() -> None:
    """Its process is killed, and `frozen` ends without an error."""
    with contextlib.ExitStack() as stack, pytest.raises(LookupError):  # noqa: PT012
        async with testing.world(["a"]):
            child = psutil.Process(await call("a", actors.pid))
            stack.enter_context(frozen("a"))
            raise LookupError("in the world")
    assert not child.is_running()


async def test_a_worker_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PROCESSES", 0.1)
    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(AssertionError, match=r"not left; the process a \(pid \d+\)$"):
            async with no_leaks():
                await stack.enter_async_context(testing.world(["a"]))


async def test_children_freeze_their_garbage_too(workers: Workers) -> None:
    """Each process of a local world does the same."""
    await workers(["a"])
    assert await call("a", gc.get_freeze_count) > 10_000
