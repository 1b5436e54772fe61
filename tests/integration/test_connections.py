"""Connections between processes: loops that end or block, and descriptors that a fork inherits."""

import asyncio
import threading

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import WorkerLost, call, remote
from aiorpc_torch.testing import Gate, Workers, connections, drop_connection
from tests.support import raw_connections
from tests.support.raw_connections import SOON, call_on_a_loop, child, ends, start

# ── between processes ───────────────────────────────────────────────────────────────────────────


async def test_a_worker_keeps_nothing_of_loops_that_end(workers: Workers) -> None:
    """Threads of this process call it from loops of their own, one after the other."""
    await workers(["a"])
    for number in range(10):
        assert await asyncio.to_thread(call_on_a_loop, number, "a") == number
    assert await call("a", raw_connections.sessions) == ["main"]
    assert [each.worker for each in connections()] == ["a"]


@pytest.mark.promise("transport.fork")
async def test_a_worker_sees_the_end_though_a_child_lives(workers: Workers) -> None:
    """What runs for an aborted connection is cancelled, whoever inherited its descriptor."""
    await workers(["a"])
    gate = remote(await aiorpc.create("a", Gate))
    (waiting,) = start(gate.passed())
    await gate.entered()
    with child():
        drop_connection("a")
        assert isinstance((await ends(waiting))[0], WorkerLost)
        async with asyncio.timeout(SOON):
            assert await gate.cancelled() == 1
        assert await call("a", raw_connections.sessions) == ["main"]


@pytest.mark.promise("calls.busy_loop")
async def test_a_caller_whose_loop_is_blocked_gets_everything(workers: Workers) -> None:
    """The worker serves others meanwhile; afterwards all results are there, in order."""
    await workers(["a", "b"])
    sent, release = threading.Event(), threading.Event()

    def caller() -> list[int]:
        async def ask() -> list[int]:
            tasks = start(*(call("a", bytes, 60_000) for _ in range(400)))
            async with asyncio.timeout(SOON):
                await tasks[0]
            sent.set()
            assert release.wait(SOON)
            return [len(await task) for task in tasks]

        return asyncio.run(ask())

    calling = asyncio.ensure_future(asyncio.to_thread(caller))
    assert await asyncio.to_thread(sent.wait, SOON)
    for number in range(10):
        assert await call("a", int, number) == number
    assert await call("b", raw_connections.ask, "a", 7) == 7
    release.set()
    assert await calling == [60_000] * 400
