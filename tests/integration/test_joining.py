"""Worlds whose membership changes: what each worker learns of the others."""

import asyncio

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import Change, WorkerLost, call
from aiorpc_torch.testing import kill, world
from tests.support import actors


@pytest.mark.promise("rejoin.changes")
async def test_changes_of_a_child_that_is_killed() -> None:
    """It is lost and returns, for this process and for the other child; then all leave."""

    async def follow(me: aiorpc.Worker) -> list[Change]:
        return [change async for change in me.changes()]

    async with world(["a", "b"], restart=1) as me:
        following = asyncio.create_task(follow(me))
        assert await call("b", actors.ask_back, "a") == "a"  # b has a connection to it
        pending = asyncio.create_task(call("a", asyncio.sleep, 600))
        kill("a")
        with pytest.raises(WorkerLost):
            await pending
        async with asyncio.timeout(30.0):
            await me.wait_for("a")
    changes = await following
    lost, returned = changes[:2]
    assert (lost.kind, lost.name, lost.rank) == ("lost", "a", 1)
    assert lost.reason == "its process was killed by SIGKILL"
    assert returned == Change("returned", "a", 1)
    assert {each.kind for each in changes[2:]} <= {"left"}
