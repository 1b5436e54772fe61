"""Peers that are killed, frozen or busy: the errors, their delay and the cancellations."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import WorkerLost, call, create, remote
from aiorpc_torch.testing import Gate, Workers, frozen, kill, world
from tests.support import actors
from tests.support.actors import Batching, Counter, Holder, Sleeper, Streams
from tests.support.slack import SLACK


async def ends_of(tasks: list["asyncio.Task[Any]"]) -> dict[str, tuple[float, Any]]:
    """Return how each task ends, and after how many seconds."""
    start = time.monotonic()
    found = {}

    def note(task: "asyncio.Task[Any]") -> None:
        found[task.get_name()] = time.monotonic() - start, task.exception() or task.result()

    for task in tasks:
        task.add_done_callback(note)
    await asyncio.wait(tasks, timeout=20.0)
    return found


def named(name: str, coroutine: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(coroutine, name=name)


@contextlib.contextmanager
def frozen_process(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def iterate(stream: Any) -> list[Any]:
    return [item async for item in stream]


@pytest.mark.promise("lost.dead", "lost.work")
async def test_killed_peer(tmp_path) -> None:
    """Its callers get WorkerLost at once, and its own calls are cancelled."""
    async with world(["b", "c"]):
        # Calls of c on b: a contribution to a round, a stream and a coroutine, in this order.
        batching, streams, gate = [await create("b", each) for each in (Batching, Streams, Gate)]
        counter = await create("c", Counter)
        theirs = [
            named("round", call("c", actors.call_on, batching, "total", 1000)),
            named("stream", call("c", actors.iterate_on, streams, "follow")),
            named("call", call("c", actors.call_on, gate, "passed")),
        ]
        async with asyncio.timeout(30.0):
            await remote(gate).entered()
            await remote(streams).followed()

        # Calls of this process on c, of every kind.
        sleeper, source = await create("c", Sleeper), await create("c", Streams)
        ours = [
            named("sleep", remote(sleeper).sleep(600)),
            named("block", remote(sleeper).block(str(tmp_path / "never"))),
            named("follow", iterate(remote(source).follow())),
            named("hop", call("b", actors.call_on, sleeper, "sleep", 600)),
        ]
        await remote(source).followed()
        held = aiter(remote(source).count(1_000_000))
        assert await anext(held) == 0

        start = time.monotonic()
        kill("c")
        ends = await ends_of([*theirs, *ours])
        for name, (seconds, outcome) in ends.items():
            print(f"killed: {name} was told after {seconds:.3f} s")
            assert isinstance(outcome, WorkerLost), (name, outcome)
            assert outcome.worker == "c"
            assert seconds < 2.0 + SLACK
        assert len(ends) == 7
        methods = {name: outcome.method for name, (_, outcome) in ends.items()}
        expected = {"sleep": "Sleeper.sleep", "block": "Sleeper.block", "follow": "Streams.follow"}
        assert methods.items() >= expected.items()
        assert methods["hop"] == "sleep", "the call that b made"
        with pytest.raises(WorkerLost, match=r"; Streams\.count may have run"):
            await iterate(held)  # after the items that were here already
        with pytest.raises(WorkerLost, match="'c' is lost"):
            await remote(counter).aadd()
        with pytest.raises(WorkerLost, match="'c' is lost"):
            await iterate(call("c", actors.count, 1))

        async with asyncio.timeout(30.0):
            assert await remote(gate).cancelled() == 1
            assert await remote(streams).closed() == 1
        print(f"killed: b had cancelled what it ran for c after {time.monotonic() - start:.3f} s")
        assert time.monotonic() - start < 2.0 + SLACK
        # The dead one's contribution is in no round: three others complete it.
        assert await asyncio.gather(*(remote(batching).total(n) for n in (1, 2, 3))) == [6, 6, 6]
        assert aiorpc.observe.stats().in_flight == 0
        start = time.monotonic()
    assert time.monotonic() - start < 5.0 + SLACK


@pytest.mark.promise("lost.exit")
@pytest.mark.parametrize(
    ("code", "reason"),
    [(None, "its process was killed by SIGKILL"), (3, "its process ended with exit code 3")],
)
async def test_a_dead_child_is_reported(
    code: int | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """To its callers, to those that wait for it, and in the log, with how to start it again."""
    told = f"{reason}; it is not restarted: `await me.restart('b')` starts it again"
    async with world(["b"]) as me, asyncio.timeout(30.0):
        gate = await create("b", Gate)
        passed = named("passed", remote(gate).passed())
        await remote(gate).entered()
        if code is None:
            kill("b")
        else:
            with pytest.raises(WorkerLost, match=reason):
                await call("b", os._exit, code)
        with pytest.raises(WorkerLost) as lost:
            await passed
        assert lost.value.reason == told
        with pytest.raises(WorkerLost, match=f"'b' is lost: {reason}; it is not restarted"):
            await me.wait_for("b")
        with pytest.raises(
            WorkerLost, match=r"await me.restart\('b'\)` starts it again; .* not sent"
        ):
            await call("b", os.getpid)
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert f"worker 'b' is lost: {told}" in warnings


async def lost_for_good(me: aiorpc.types.Worker, peer: str) -> None:
    """Wait until a peer that was killed is lost and will not rejoin."""
    while True:
        await me.wait_for(peer)
        await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.promise("lost.frozen")
async def test_frozen_and_busy_peers(workers: Workers) -> None:
    """A busy peer is not lost; a frozen peer is, until it thaws."""
    heartbeat = 2.0
    await workers(["b", "c"], heartbeat=heartbeat, transports=["uv"])
    await check_busy_loops(heartbeat)
    await check_frozen(heartbeat)
    await check_that_keeps_the_gil(heartbeat)


async def check_busy_loops(heartbeat: float) -> None:
    """Threads of torch answer pings while the loop is blocked."""
    gates = [await create("b", Gate), await create("b", Gate)]
    waiting = [
        asyncio.create_task(remote(gates[0]).passed()),
        asyncio.create_task(call("c", actors.try_on, gates[1], "passed")),
    ]
    for gate in gates:
        await remote(gate).entered()
    # c calls b and runs a call of this process, so it watches both: neither is lost.
    held = asyncio.create_task(call("b", actors.hold_loop, 1.25 * heartbeat))
    for _ in range(3):  # until it is sent
        await asyncio.sleep(0)
    await actors.hold_loop(1.25 * heartbeat)
    await held
    await asyncio.sleep(
        heartbeat / 4
    )  # this process checks again, without a sign of life meanwhile
    assert [await remote(gate).cancelled(0) for gate in gates] == [0, 0]
    for gate in gates:
        await remote(gate).open()
    assert await asyncio.gather(*waiting) == [None, "None"]


async def check_that_keeps_the_gil(heartbeat: float) -> None:
    """torch answers pings without the GIL: what waits for the peer goes on, and runs once."""
    gate = await create("b", Gate)
    waiting = [asyncio.create_task(each) for each in (remote(gate).passed(), call("b", actors.pid))]
    await remote(gate).entered()
    seconds = 2.5 * heartbeat
    assert await call("b", actors.keep_gil, seconds) == seconds
    await remote(gate).open()
    assert await asyncio.gather(*waiting) == [None, await call("b", actors.pid)]
    assert await remote(gate).cancelled(0) == 0


async def check_frozen(heartbeat: float) -> None:
    """Its callers and its callees lose it."""
    pid = await call("c", actors.pid)
    mine, theirs = await create("c", Gate), await create("c", Gate)  # c runs calls of others
    gate, streams = await create("b", Gate), await create("b", Streams)  # c calls b
    await call("c", actors.try_in_a_task, gate, "passed")
    await remote(gate).entered()
    tasks = [
        named("what c asked of b", call("c", actors.try_on, gate, "passed")),
        named("what b asked of c", call("b", actors.try_on, theirs, "passed")),
        named("call", remote(mine).passed()),
        named("stream", iterate(call("c", actors.wait_for_ever))),
        named("of b's stream", call("c", actors.iterate_on, streams, "follow")),
    ]
    async with asyncio.timeout(30.0):
        for each in (theirs, mine):
            await remote(each).entered()
        await remote(gate).entered(2)
        await remote(streams).followed()
    start = time.monotonic()
    with frozen("c"):
        ends = await ends_of(tasks)
        assert len(ends) == len(tasks)
        for name, (seconds, outcome) in ends.items():
            print(f"frozen, heartbeat {heartbeat}: {name} was told after {seconds:.3f} s")
            told = outcome if isinstance(outcome, str) else repr(outcome)
            assert told.startswith("WorkerLost("), (name, told)
            assert re.search(r"'c' is lost: no sign of life for [\d.]+ s", told), (name, told)
            assert seconds < 3 * heartbeat + SLACK
        async with asyncio.timeout(30.0):
            assert await remote(gate).cancelled(2) == 2
            assert await remote(streams).closed() == 1
        print(f"frozen: b had cancelled what it ran for c after {time.monotonic() - start:.3f} s")
        assert time.monotonic() - start < 3 * heartbeat + SLACK
        with pytest.raises(WorkerLost, match="'c' is lost"):  # new calls fail as well
            await call("c", actors.name_of_worker)
    # Thawed: it serves again, and has cancelled the calls of those that lost it.
    async with asyncio.timeout(30.0):
        assert await call("c", actors.pid) == pid
        assert await remote(mine).cancelled() == 1
        assert await call("b", actors.try_on, theirs, "cancelled") == "1"
        counter = await create("b", Counter)
        assert await call("c", actors.call_on, counter, "aadd", 5) == 5
    (told,) = await call("c", actors.tried)  # b had ended it: nothing was cancelled here
    assert told.startswith("WorkerLost(\"worker 'b' is lost: it had lost worker 'c' (no sign of"), (
        told
    )
    assert told.endswith('passed may have run")'), told
    assert aiorpc.observe.stats().in_flight == 0


@pytest.mark.parametrize("heartbeat", [0.0, -1.0, 1e-9, float("inf"), float("nan")])
async def test_invalid_heartbeat(heartbeat: float) -> None:
    """It raises before anything starts."""
    with pytest.raises(ValueError, match="heartbeat must be a finite number"):
        async with aiorpc.local_world(0, heartbeat=heartbeat):
            pass


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
@pytest.mark.parametrize("option", ["start_timeout", "stop_timeout"])
async def test_invalid_timeout(option: str, seconds: float) -> None:
    """As that of a heartbeat."""
    with pytest.raises(ValueError, match=f"{option} must be at least 0 s, got {seconds}"):
        async with aiorpc.local_world(0, **{option: seconds}):
            pass


async def test_losses_say_whether_the_call_was_sent() -> None:
    """A killed worker's pending calls may have run; calls that are made later were not sent."""
    async with world(["b"]):
        counter, sleeper = await create("b", Counter), await create("b", Sleeper)
        batching, streams = await create("b", Batching), await create("b", Streams)
        net = await create("b", torch.nn.Linear, 2, 1)
        params = await aiorpc.autograd.parameter_rrefs(net)
        optimizer = await aiorpc.autograd.DistributedOptimizer.create(
            torch.optim.SGD, params, lr=0.1
        )
        pending = {
            "Sleeper.sleep": named("sleep", remote(sleeper).sleep(600)),
            "Batching.total": named("total", remote(batching).total(1)),
            "Streams.follow": named("follow", iterate(remote(streams).follow())),
            "wait_for_ever": named("wait", iterate(call("b", actors.wait_for_ever))),
        }
        await remote(streams).followed()
        kill("b")
        for name, task in pending.items():
            with pytest.raises(WorkerLost, match=f"; {name} may have run$") as raised:
                await task
            error = raised.value
            assert (error.worker, error.method, error.may_have_run) == ("b", name, True)

        async with aiorpc.autograd.context() as context:
            later: dict[str, Any] = {
                "Counter.add": lambda: remote(counter).add(),
                "pid": lambda: call("b", actors.pid),
                "Counter": lambda: create("b", Counter),
                "fetch": lambda: aiorpc.fetch(counter),
                "Streams.count": lambda: iterate(remote(streams).count(3)),
                "Batching.double": lambda: remote(batching).double(1),
                "LocalOptimizer.step": lambda: optimizer.step(context),
                "Linear.forward": lambda: remote(net).forward(torch.ones(2)),  # in the context
            }
            for name, make in later.items():
                with pytest.raises(WorkerLost, match=f"; {name} was not sent$") as raised:
                    await make()
                error = raised.value
                assert (error.worker, error.method, error.may_have_run) == ("b", name, False)


# ── RRefs of its objects ────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("lost.rrefs")
async def test_an_rref_of_a_lost_worker_is_not_passed_on() -> None:
    """Neither to another worker nor back: torch would abort the process that receives it."""
    async with world(["a", "b", "c"]):
        counter, holder = await create("a", Counter), await create("b", Holder)
        other = await create("c", Holder)
        await remote(holder).take(counter)
        kill("a")
        with pytest.raises(WorkerLost):
            await remote(counter).add(1)
        with pytest.raises(ReferenceError, match="worker 'a', which is lost"):
            await remote(other).take(counter)
        with pytest.raises(ReferenceError, match="worker 'a', which is lost"):
            await remote(holder).given()
        assert await call("b", actors.pid) != await call("c", actors.pid), "both live"
