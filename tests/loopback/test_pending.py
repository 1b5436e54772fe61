"""`pending()`: the calls in flight, and the report that SIGUSR1 prints."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, batched, call, remote, testing
from aiorpc_torch.observe import PendingCall, pending
from aiorpc_torch.testing import Gate


class Waits:
    def __init__(self) -> None:
        self.gate = Gate()

    async def wait(self, item: int) -> int:
        await self.gate.passed()
        return item

    def wait_in_thread(self, item: int) -> int:
        self.gate.passed_in_thread()
        return item

    async def items(self) -> AsyncIterator[int]:
        yield 1
        await self.gate.passed()

    @batched(max_size=8)
    async def batch(self, items: list[int]) -> list[int]:
        await self.gate.passed()
        return items


async def wait_at(rref: Any) -> None:
    await rref.local_value().gate.passed()


def named(incoming: bool) -> list[tuple[str, str]]:
    return sorted((each.method, each.worker) for each in pending() if each.incoming is incoming)


@pytest.mark.usefixtures("world")
async def test_calls_in_flight_are_listed() -> None:
    """Of every kind, at both ends, until they are answered; the oldest first."""
    waits = Waits()
    rref = RRef(waits)
    before = time.monotonic()
    stream = aiter(remote(rref).items())
    assert await anext(stream) == 1
    calls = [
        asyncio.create_task(each)  # type: ignore[arg-type]
        for each in (
            remote(rref).wait(1),
            remote(rref).wait_in_thread(2),
            remote(rref).batch(3),
            call("main", wait_at, rref),
        )
    ]
    await waits.gate.entered(5)
    names = ["Waits.batch", "Waits.items", "Waits.wait", "Waits.wait_in_thread", "wait_at"]
    assert named(incoming=True) == [(name, "main") for name in names]
    made = {name.rpartition(".")[2] for name, _ in named(incoming=False)}  # with the class or not
    assert made == {name.rpartition(".")[2] for name in names}
    assert len(named(incoming=False)) == len(names)
    found = pending()
    took = time.monotonic() - before
    assert {each.worker for each in found} == {"main"}
    ages = [each.age for each in found]
    assert ages == sorted(ages, reverse=True)
    assert all(0 <= age <= took for age in ages)
    assert found[0].method.endswith("items")
    await asyncio.sleep(0.02)
    assert all(each.age >= 0.02 for each in pending())
    await waits.gate.open()
    await asyncio.gather(*calls)
    assert [each async for each in stream] == []
    assert pending() == []


@pytest.mark.promise("worlds.hung_threads")
async def test_every_thread_of_the_worker_hangs() -> None:
    """The counters and the calls in flight are read on the event loop."""
    async with aiorpc.local_world(0, threads=1), asyncio.timeout(30):
        waits = Waits()
        hung = asyncio.create_task(remote(RRef(waits)).wait_in_thread(1))  # type: ignore[arg-type]
        await waits.gate.entered()
        found = await call("main", pending)
        counters = await call("main", aiorpc.observe.stats)
        assert [each.method for each in found if each.incoming] == ["Waits.wait_in_thread"]
        assert counters.running == 2  # the hung call, and that of `stats`
        await waits.gate.open()
        assert await hung == 1


@pytest.mark.usefixtures("world")
async def test_calls_of_plain_torch_clients() -> None:
    waits = Waits()
    rref = RRef(waits)
    # Not `rref.rpc_sync()`: torch asks the agent of the first world of this process for its name.
    sending = asyncio.to_thread(rpc.rpc_sync, "main", Waits.batch, args=(rref, 1))
    done = asyncio.create_task(sending)
    await waits.gate.entered()
    (found,) = pending()
    assert (found.method, found.worker, found.incoming) == ("Waits.batch", "a torch client", True)
    await waits.gate.open()
    assert await done == 1


async def test_outside_a_world() -> None:
    assert pending() == []
    assert PendingCall("m", "w", 1.0, True).incoming


async def test_the_report_names_calls_and_stacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stack goes on through the coroutines that a task awaits."""
    monkeypatch.setenv("AIORPC_TORCH_DUMP_ON_SIGUSR1", "1")
    async with testing.world():
        waits = Waits()
        waiting = asyncio.create_task(remote(RRef(waits)).wait(1), name="caller")  # type: ignore[arg-type]
        await waits.gate.entered()
        os.kill(os.getpid(), signal.SIGUSR1)
        await waits.gate.open()
        assert await waiting == 1
    text = capfd.readouterr().err
    assert f"2 calls in flight in process {os.getpid()}" in text
    assert "Waits.wait from worker 'main'" in text
    assert "wait to worker 'main'" in text
    assert "Task 'caller':" in text
    assert "in Waits.wait" in text
    assert "in Gate.passed" in text


async def test_a_signal_prints_the_report(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Stacks of threads, calls and stacks of tasks; only where the environment asks for it."""
    monkeypatch.setenv("AIORPC_TORCH_DUMP_ON_SIGUSR1", "1")
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    async with testing.world():
        waits = Waits()
        waiting = asyncio.create_task(remote(RRef(waits)).wait(1))  # type: ignore[arg-type]
        await waits.gate.entered()
        os.kill(os.getpid(), signal.SIGUSR1)
        await waits.gate.open()
        assert await waiting == 1
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    text = capfd.readouterr().err
    assert "most recent call first" in text
    assert "2 calls in flight" in text
    assert "in Gate.passed" in text


async def test_the_signal_of_another_handler_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIORPC_TORCH_DUMP_ON_SIGUSR1", "1")
    former = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        async with testing.world():
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert "has no effect" in caplog.text


@pytest.mark.usefixtures("world")
async def test_no_handler_by_default() -> None:
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert aiorpc.observe.pending is pending
