"""`aiorpc_torch.testing` in one process: gates, worlds of one, futures, leaks, garbage."""

import asyncio
import contextlib
import gc
import inspect
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.futures import Future

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, call, create, remote, testing
from aiorpc_torch.testing import Gate, frozen, kill, leaks, no_leaks
from tests.support import actors

# ── gates ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("world")
class TestGate:
    """Calls stand at it, and a test knows how many."""

    @pytest.mark.promise("testing.gate")
    async def test_waiting_calls_are_counted_and_let_through(self) -> None:
        """`entered` waits for as many as it is asked for."""
        gate = await create("main", Gate)
        counted = asyncio.create_task(remote(gate).entered(3))
        waiting = [asyncio.create_task(remote(gate).passed()) for _ in range(2)]
        assert await remote(gate).entered(2) == 2
        assert not counted.done()
        waiting.append(asyncio.create_task(remote(gate).passed()))
        assert await counted == 3
        assert not any(task.done() for task in waiting)
        await remote(gate).open()
        assert await asyncio.gather(*waiting) == [None] * 3
        await remote(gate).passed()
        assert await remote(gate).entered(0) == 4, "who finds it open is counted too"

    async def test_shut_again(self) -> None:
        """Later calls wait; earlier ones have passed."""
        gate = RRef(Gate())
        await remote(gate).open()
        await remote(gate).passed()
        await remote(gate).shut()
        waiting = asyncio.create_task(remote(gate).passed())
        assert await remote(gate).entered(2) == 2
        assert not waiting.done()
        await remote(gate).open()
        await waiting

    async def test_cancelled_calls_are_counted(self) -> None:
        """`cancelled` waits until the callee has seen it."""
        gate = await create("main", Gate)
        tasks = [asyncio.create_task(remote(gate).passed()) for _ in range(3)]
        await remote(gate).entered(3)
        assert await remote(gate).cancelled(0) == 0
        for task in tasks[:2]:
            task.cancel()
        assert await remote(gate).cancelled(2) == 2
        await remote(gate).open()
        await tasks[2]
        assert await remote(gate).cancelled(0) == 2

    async def test_threads_wait_at_it_too(self) -> None:
        """A plain `def` holds its thread there, beside coroutines."""
        gate = await create("main", Gate)
        waiting = [asyncio.create_task(remote(gate).passed_in_thread()) for _ in range(3)]
        waiting.append(asyncio.create_task(remote(gate).passed()))
        assert await remote(gate).entered(4) == 4
        assert not any(task.done() for task in waiting)
        await remote(gate).open()
        await asyncio.gather(*waiting)

    async def test_its_repr_has_its_counts(self) -> None:
        gate = Gate()
        waiting = asyncio.create_task(gate.passed())
        await gate.entered()
        assert repr(gate) == "<Gate shut, 1 entered, 0 cancelled>"
        await gate.open()
        await waiting
        assert repr(gate) == "<Gate open, 1 entered, 0 cancelled>"

    async def test_a_count_may_be_cancelled(self) -> None:
        """A cancelled wait for a count has no effect on others."""
        gate = Gate()
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(said))
        asking = asyncio.create_task(gate.entered())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await gate.open()
        await gate.passed()
        assert await gate.entered() == 1
        await asyncio.sleep(0)
        assert complaints == []


# ── connections ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("world")
class TestConnections:
    """They are seen, dropped and held back."""

    @pytest.mark.promise("testing.connections")
    @pytest.mark.parametrize("error", [None, aiorpc.WorkerLost("main", "for this test")])
    async def test_a_dropped_connection(self, error: aiorpc.WorkerLost | None) -> None:
        """Its calls end at both ends, and the next call has another connection."""
        gate = Gate()
        waiting = asyncio.create_task(remote(RRef(gate)).passed())
        await gate.entered()
        before = testing.connection("main")
        assert (before.worker, before.pending) == ("main", 1)
        testing.drop_connection("main", error)
        with pytest.raises(aiorpc.WorkerLost) as raised:
            await waiting
        assert error is None or raised.value.reason == error.reason
        async with asyncio.timeout(30.0):
            await gate.cancelled()
            assert await call("main", int, "3") == 3
            await testing.settled()
        assert [each.number > before.number for each in testing.connections()] == [True]

    @pytest.mark.promise("testing.connections")
    async def test_a_stalled_connection(self) -> None:
        """Calls wait unsent until the block ends."""
        await call("main", int)
        with testing.stalled("main"):
            waiting = asyncio.create_task(call("main", int, "3"))
            with pytest.raises(aiorpc.CallTimeout, match="was not sent"), aiorpc.timeout(0.05):
                await call("main", int)
            assert testing.connection("main").pending == 1
            assert aiorpc.observe.stats().unsent > 0
        assert await waiting == 3

    @pytest.mark.promise("testing.connections")
    async def test_settled_waits_for_what_is_in_flight(self) -> None:
        """For cancelled calls, too, until their callee has ended them."""
        gate = Gate()
        waiting = asyncio.create_task(remote(RRef(gate)).passed())
        await gate.entered()
        settled = asyncio.create_task(testing.settled())
        await call("main", int)
        assert not settled.done()
        waiting.cancel()
        async with asyncio.timeout(30.0):
            await settled
        assert aiorpc.observe.stats().running == 0

    async def test_memory_of_large_tensors(self) -> None:
        """It is held while a received tensor is alive."""
        async with asyncio.timeout(30.0):
            while testing.connection("main").result_carrier != "shared memory":
                await call("main", int)
            x = await call("main", torch.ones, testing.limits.INLINE_BYTES)
            assert testing.connection("main").holds_memory
            del x
            gc.collect()
            while testing.connection("main").holds_memory:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def test_the_connections_of_all_loops(self) -> None:
        """A loop that has ended has none."""
        await call("main", int)

        async def there() -> int:
            await call("main", int)
            return len(testing.connections())

        assert await asyncio.to_thread(lambda: asyncio.run(there())) == 2
        assert len(testing.connections()) == 1

    async def test_flow_limits(self) -> None:
        """They hold from the next call on, and what is left out stays."""
        with pytest.raises(ValueError, match="calls must be positive, got -1"):
            testing.set_flow_limits("main", calls=-1)
        testing.set_flow_limits("main", calls=1, interval=600.0)
        gate = Gate()
        waiting = [asyncio.create_task(remote(RRef(gate)).passed()) for _ in range(3)]
        await gate.entered()
        assert aiorpc.observe.stats().unsent == 2
        testing.set_flow_limits("main", calls=3)
        await gate.open()
        assert await asyncio.gather(*waiting) == [None] * 3


async def test_connections_outside_a_world() -> None:
    """There are none to act on."""
    for act in (testing.connection, testing.drop_connection, testing.set_flow_limits):
        with pytest.raises(aiorpc.NotInWorld):
            act("main")
    with pytest.raises(aiorpc.NotInWorld):
        testing.connections()
    with pytest.raises(aiorpc.NotInWorld):
        await testing.settled()


# ── worlds ──────────────────────────────────────────────────────────────────────────────────────


def test_a_world_takes_what_local_world_takes() -> None:
    """`Options` are its keywords, each with its type."""
    parameters = inspect.signature(aiorpc.local_world).parameters
    keywords = {
        name: each.annotation
        for name, each in parameters.items()
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert testing.Options.__annotations__ == keywords


async def test_a_world_of_one() -> None:
    async with testing.world() as me:
        assert (me.name, me.world_size) == ("main", 1)
    async with testing.world(0, name="alone") as me:
        assert await call("alone", actors.pid) == os.getpid()


def test_faults_need_a_child() -> None:
    """An unknown name raises at once."""
    with pytest.raises(ValueError, match="not a child process of this one; its children: none"):
        kill("ps")
    with pytest.raises(ValueError, match="'ps' is not a child"), frozen("ps"):
        pass


# ── futures ─────────────────────────────────────────────────────────────────────────────────────


async def test_futures_completed_by_hand() -> None:
    """Done, failed, and completed where torch would."""
    assert await aiorpc.wrap_future(testing.done_future(1)) == 1
    with pytest.raises(LookupError):
        await aiorpc.wrap_future(testing.failed_future(LookupError("x")))
    future: Future[str] = Future()
    awaited = aiorpc.wrap_future(future)
    testing.on_a_thread(lambda: future.set_result(threading.current_thread().name))
    assert await awaited != threading.current_thread().name


# ── leaks ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and processes count as leaks at once."""
    monkeypatch.setattr(leaks, "THREADS", 0.1)
    monkeypatch.setattr(leaks, "PROCESSES", 0.1)


class TestLeaks:
    """Each kind is found and named; what ends in time is not."""

    async def test_nothing(self) -> None:
        async with no_leaks(), testing.world():
            gate = await create("main", Gate)
            await remote(gate).open()
            await remote(gate).passed_in_thread()

    @pytest.mark.promise("testing.leaks")
    async def test_a_task(self) -> None:
        with pytest.raises(AssertionError, match=r"the task forgotten in .*Event\.wait"):
            async with no_leaks():
                task = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
        task.cancel()

    async def test_a_task_that_is_about_to_end(self) -> None:
        async with no_leaks():
            asyncio.create_task(asyncio.sleep(0)).add_done_callback(print)

    @pytest.mark.promise("testing.leaks")
    @pytest.mark.usefixtures("world")
    async def test_a_pending_call(self) -> None:
        gate = await create("main", Gate)
        with pytest.raises(AssertionError, match=r"; 2 pending calls \(.+, .+\)$"):  # noqa: PT012
            async with no_leaks():
                calls = [asyncio.create_task(remote(gate).passed()) for _ in range(2)]
                await remote(gate).entered(2)
        await remote(gate).open()
        await asyncio.gather(*calls)

    @pytest.mark.usefixtures("world")
    async def test_a_call_that_was_pending_before(self) -> None:
        gate = await create("main", Gate)
        pending = asyncio.create_task(remote(gate).passed())
        await remote(gate).entered()
        async with no_leaks():
            await remote(gate).entered()
        await remote(gate).open()
        await pending

    @pytest.mark.promise("testing.leaks")
    @pytest.mark.usefixtures("impatient")
    async def test_a_thread_of_ours(self) -> None:
        release = threading.Event()
        thread = threading.Thread(target=release.wait, name="aiorpc-def-7")
        with pytest.raises(AssertionError, match=r"left behind: the thread aiorpc-def-7$"):
            async with no_leaks():
                thread.start()
        release.set()
        thread.join()

    @pytest.mark.promise("testing.leaks")
    @pytest.mark.usefixtures("impatient")
    async def test_a_process(self) -> None:
        with pytest.raises(AssertionError, match=r"left behind: the process \w.* \(pid \d+\)$"):
            async with no_leaks():
                process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # noqa: ASYNC220
        process.communicate()

    @pytest.mark.promise("testing.leaks")
    async def test_a_world(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            with pytest.raises(AssertionError, match="a world that was not left"):
                async with no_leaks():
                    await stack.enter_async_context(testing.world())

    async def test_the_exception_of_the_block_goes_first(self) -> None:
        with pytest.raises(LookupError):  # noqa: PT012
            async with no_leaks():
                task = asyncio.create_task(asyncio.Event().wait())
                raise LookupError("of the block")
        task.cancel()


# ── what it says of itself ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", testing.__all__)
def test_every_name_is_described(name: str) -> None:
    """In its docstring, on the page, and in the API."""
    assert (inspect.getdoc(getattr(testing, name)) or "").strip()
    docs = Path(__file__).parents[2] / "docs"
    assert f"::: aiorpc_torch.testing.{name}\n" in (docs / "reference" / "testing.md").read_text()
    if name != "Options":
        assert name in (docs / "testing.md").read_text()


# ── with hypothesis ─────────────────────────────────────────────────────────────────────────────


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.lists(st.integers()))
async def test_one_world_for_all_examples(world: aiorpc.types.Worker, numbers: list[int]) -> None:
    """The fixture is there once for the test: an example makes its own objects in it."""
    counter = await create(world.name, actors.Counter)
    for number in numbers:
        await remote(counter).aadd(number)
    assert await remote(counter).add(0) == sum(numbers)


class TestGarbage:
    """`freeze_gc`: what is there when a world starts is left out of collections until it ends."""

    @pytest.mark.promise("worlds.gc")
    async def test_by_default(self) -> None:
        """It is frozen inside, and thawed afterwards."""
        assert gc.get_freeze_count() == 0
        async with testing.world():
            assert gc.get_freeze_count() > 10_000
        assert gc.get_freeze_count() == 0

    @pytest.mark.promise("worlds.gc")
    async def test_where_python_has_frozen_some(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From 3.12 on a process begins with such objects: what is there is frozen all the same."""
        monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
        async with testing.world():
            monkeypatch.undo()
            assert gc.get_freeze_count() > 10_000

    @pytest.mark.promise("worlds.gc")
    async def test_on_request_it_is_not(self) -> None:
        """Nothing is frozen."""
        async with testing.world(freeze_gc=False):
            assert gc.get_freeze_count() == 0

    @pytest.mark.promise("worlds.gc")
    async def test_what_a_program_has_frozen(self) -> None:
        """It stays frozen: it is the program's to thaw."""
        gc.freeze()
        try:
            before = gc.get_freeze_count()
            async with testing.world():
                pass
            assert gc.get_freeze_count() > before // 2
        finally:
            gc.unfreeze()
