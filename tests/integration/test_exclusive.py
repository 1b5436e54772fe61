"""`@exclusive` between processes: a caller that dies frees its place; own calls through others."""

import asyncio
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, call, remote, testing
from aiorpc_torch.testing import Gate


@aiorpc.exclusive
class Shared:
    def __init__(self) -> None:
        self.gate = Gate()
        self.log: list[Any] = []

    async def work(self, item: Any) -> Any:
        self.log.append(item)
        return item

    async def hold(self, item: Any) -> None:
        self.log.append(item)
        await self.gate.passed()

    async def through(self, worker: str, rref: Any) -> Any:
        return await call(worker, ask, rref, "work", "through")


async def ask(rref: Any, name: str, item: Any) -> Any:
    return await getattr(remote(rref), name)(item)


@pytest.mark.worlds
async def test_turns_between_processes(workers: Any) -> None:
    """A call by the object itself through a worker is refused; a dead caller's places are freed."""
    await workers(["a"], heartbeat=2.0)
    shared = Shared()
    rref = RRef(shared)
    with pytest.raises(RuntimeError, match="an exclusive object calls itself"):
        await remote(rref).through("a", rref)
    holds = asyncio.create_task(call("a", ask, rref, "hold", "held by a"))
    await shared.gate.entered()
    waits = asyncio.create_task(call("a", ask, rref, "work", "waits for a"))
    for _ in range(1000):  # the call has come when it is listed
        if len([each for each in aiorpc.observe.pending() if each.incoming]) == 2:
            break
        await asyncio.sleep(0.01)
    own = asyncio.create_task(remote(rref).work("own"))
    testing.kill("a")
    for task in (holds, waits):
        with pytest.raises(aiorpc.WorkerLost):
            await task
    assert await own == "own"
    assert shared.log == ["held by a", "own"]
