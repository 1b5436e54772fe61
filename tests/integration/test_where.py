"""`where()` and the errors of late calls, over several workers."""

import asyncio
import logging
import os
import signal
import time
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import call, create, exclusive, remote
from aiorpc_torch.observe import where
from aiorpc_torch.testing import Gate
from tests.support.where import SOON, Guard, line_of, until_late, until_stands


class Part:
    """Holds its lock while it calls the other one, as the server and the learner of Gorila do."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.lock = asyncio.Lock()

    async def entered(self) -> None:
        await self.gate.entered()

    async def open(self) -> None:
        await self.gate.open()

    async def update(self, other: Any) -> None:
        async with self.lock:
            await self.gate.passed()
            await remote(other).read()

    async def read(self) -> None:
        async with self.lock:
            pass

    async def relay(self, others: list[Any]) -> None:
        if not others:
            await self.gate.passed()
        else:
            await remote(others[0]).relay(others[1:])

    def block(self) -> None:
        self.gate.passed_in_thread()

    async def block_loop(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251


@exclusive
class ExclusivePart(Part):
    async def update_when_told(self, gate: Any, other: Any) -> None:
        await remote(gate).passed()
        await remote(other).read()


async def deadlock(one: Any, two: Any) -> list["asyncio.Future[Any]"]:
    calls = [
        asyncio.ensure_future(remote(one).update(two)),
        asyncio.ensure_future(remote(two).update(one)),
    ]
    for each in one, two:
        await remote(each).entered()
    for each in one, two:
        await remote(each).open()
    await until_stands("deadlock, ")
    return calls


async def end(calls: "list[asyncio.Future[Any]]") -> None:
    for each in calls:
        each.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.promise("where.deadlock", "where.late")
async def test_two_locks_over_three_workers(workers: Any) -> None:
    """The error of a third worker's call names both locks, their holders and the circle."""
    await workers(["server", "learner"])
    server, learner = await create("server", Part), await create("learner", Part)
    calls = await deadlock(server, learner)

    async def late() -> None:
        async with aiorpc.timeout(1.0):
            await remote(server).read()

    text = str(await until_late(late, "\ndeadlock"))
    read, update = line_of(Part.read, "with"), line_of(Part.update, "read()")
    assert text.splitlines()[0] == (
        "Part.read on worker 'server' timed out after 1 s; it may have run. It stood here:"
    )
    assert f"waits for a lock at {read}" in text
    for worker in "server", "learner":
        assert f"the lock is held by Part.update on worker '{worker}'" in text
    assert f"waits at {update}" in text
    circle = "Part.update on worker 'server' -> Part.read on worker 'learner' -> "
    circle += "Part.update on worker 'learner' -> Part.read on worker 'server' -> "
    assert f"\ndeadlock, these calls wait for each other: {circle}Part.update" in text
    assert [len(each) for each in (await call("learner", where)).deadlocks()] == [5]
    await end(calls)


class Job:
    async def run(self, gate: Any, first: Any, second: Any) -> None:
        async with remote(first).hold():
            await remote(gate).passed()
            async with remote(second).hold():
                pass


@pytest.mark.promise("where.deadlock")
@pytest.mark.slow
async def test_two_remote_blocks(workers: Any) -> None:
    await workers(["locks", "a", "b"])
    locks = [await create("locks", Guard) for _ in range(2)]
    gate = await create("locks", Gate)
    jobs = [await create(each, Job) for each in ("a", "b")]
    calls = [
        asyncio.ensure_future(remote(job).run(gate, *order))
        for job, order in zip(jobs, (locks, locks[::-1]), strict=True)
    ]
    await remote(gate).entered(2)
    await remote(gate).open()
    found = await until_stands("\ndeadlock, ")
    (circle,) = found.deadlocks()
    hold = ("Guard.hold", "locks")
    half = [("Job.run", "a"), hold, hold, ("Job.run", "b"), hold, hold, ("Job.run", "a")]
    assert [(each.method, each.worker) for each in circle] in (half, [*half[3:], *half[1:4]])
    await end(calls)


@pytest.mark.promise("where.deadlock")
@pytest.mark.slow
async def test_two_exclusive_objects(workers: Any) -> None:
    """Each has its turn and waits for the other's."""
    await workers(["a", "b"])
    parts = [await create(each, ExclusivePart) for each in ("a", "b")]
    gate = await create("a", Gate)
    calls = [
        asyncio.ensure_future(remote(one).update_when_told(gate, two))
        for one, two in (parts, parts[::-1])
    ]
    await remote(gate).entered(2)
    await remote(gate).open()
    found = await until_stands("deadlock, ")
    assert "the turn is held by ExclusivePart.update_when_told on worker 'b'" in str(found)
    await end(calls)


@pytest.mark.promise("where.lines")
@pytest.mark.slow
async def test_a_chain_over_three_workers(workers: Any) -> None:
    await workers(["a", "b", "c"])
    first, *rest = [await create(each, Part) for each in ("a", "b", "c")]
    calls = [asyncio.ensure_future(remote(first).relay(rest))]
    found = await until_stands(at := line_of(Part.relay, "passed"))
    one = found[0]
    assert [one.worker, one.waits_for[0].worker] == ["a", "b"]
    last = one.waits_for[0].waits_for[0]
    assert (last.worker, last.caller) == ("c", "b")
    assert [str(each) for each in last.lines] == [at]
    await end(calls)


@pytest.mark.slow
@pytest.mark.promise("where.late")
@pytest.mark.parametrize("how", ["frozen", "blocked"])
async def test_a_worker_that_does_not_answer(workers: Any, how: str) -> None:
    """The error comes at its time, and says why nothing is known. `where` takes a second."""
    await workers(["a", "b"], heartbeat=30.0)
    part, other = await create("a", Part), await create("b", Part)
    pid = await call("a", os.getpid)
    if how == "frozen":
        os.kill(pid, signal.SIGSTOP)
        blocking = asyncio.ensure_future(remote(part).read())
    else:
        blocking = asyncio.ensure_future(remote(part).block_loop(5.0))
    await asyncio.sleep(0)  # it is sent before the next call
    calls = [blocking, asyncio.ensure_future(remote(other).relay([]))]
    try:
        text = "unknown: its worker has not answered"
        if how == "blocked":
            line = line_of(Part.block_loop, "sleep")
            text = f"waits: the event loop there is blocked at {line}"

        async def late() -> None:
            async with aiorpc.timeout(0.5):
                await remote(part).read()

        error = await until_late(late, text)
        assert str(error).startswith("Part.read on worker 'a' timed out after 0.5 s; ")
        await until_stands(line_of(Part.relay, "passed"), text)
    finally:
        os.kill(pid, signal.SIGCONT)
        await end(calls)


@pytest.mark.slow
@pytest.mark.promise("where.long", "where.deadlock")
async def test_a_warning_of_long_waits(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes at the caller that is no call itself."""
    warned = asyncio.get_running_loop().create_future()

    def on_record(record: logging.LogRecord) -> bool:
        loop, text = warned.get_loop(), record.getMessage()
        if "have waited" in text and not warned.done():
            loop.call_soon_threadsafe(warned.set_result, text)
        return True

    monkeypatch.setattr(logging.getLogger("aiorpc_torch"), "filters", [on_record])
    await workers(["server", "learner"])
    server, learner = await create("server", Part), await create("learner", Part)
    calls = await deadlock(server, learner)
    message = await asyncio.wait_for(warned, SOON)
    assert message.startswith("calls have waited for 10 s:\nPart.update on worker ")
    assert "deadlock, these calls wait for each other: Part.update on worker" in message
    await end(calls)


@pytest.mark.promise("where.lines")
@pytest.mark.slow
def test_from_synchronous_code() -> None:
    with aiorpc.in_thread(aiorpc.local_world(["a"])) as me:
        part = me.run(create("a", Part))
        calls = me.run(lambda: [asyncio.ensure_future(remote(part).relay([]))])
        found = me.run(until_stands, at := line_of(Part.relay, "passed"))
        assert [str(each) for each in found[0].lines] == [at]
        assert str(me.run(where)).startswith("Part.relay on worker 'a', ")
        me.run(end, calls)
