"""`aiorpc_torch.testing`: gates, worlds with forkserver children, faults, leaks."""

import asyncio
import contextlib
import gc
import inspect
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import actors
import psutil
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.futures import Future

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, WorkerLost, call, create, remote, testing
from aiorpc_torch.testing import Gate, Workers, forkserver, frozen, kill, no_leaks

# ── gates ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("world")
class TestGate:
    """Calls stand at it, and a test knows how many."""

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


class Clerk:
    """Works only when its gate is open."""

    def __init__(self, gate: RRef[Gate]) -> None:
        self.gate = gate

    async def work(self) -> str:
        await remote(self.gate).passed()
        return "done"


@pytest.mark.worlds
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


def what_is_seen() -> tuple[str | None, str, str]:
    return os.environ.get("AIORPC_TEST"), os.getcwd(), os.environ["PATH"]


@pytest.mark.worlds
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


@pytest.mark.worlds
async def test_forkserver_children_come_from_a_process_with_one_thread() -> None:
    """The import of torch starts no thread (2.13, 2.15), so a fork after it is safe."""
    async with testing.world(["a"]):
        parent = psutil.Process(await call("a", actors.pid)).parent()
        assert parent is not None
        assert parent.pid in forkserver.helper_pids()
        assert parent.pid != os.getpid()
        assert parent.num_threads() == 1
        assert "libtorch" in "".join(each.path for each in parent.memory_maps()), "it was imported"


@pytest.mark.worlds
async def test_only_worlds_for_tests_use_the_forkserver() -> None:
    """`local_world` spawns interpreters, before, inside and after."""
    async with testing.world(["a"]):
        pass
    async with aiorpc.local_world(["a"]):
        assert psutil.Process(await call("a", actors.pid)).ppid() == os.getpid()


# ── faults ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.worlds
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


@pytest.mark.worlds
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


@pytest.mark.worlds
async def test_a_world_that_ends_while_a_worker_is_frozen() -> None:
    """Its process is killed, and `frozen` ends without an error."""
    with contextlib.ExitStack() as stack, pytest.raises(LookupError):  # noqa: PT012
        async with testing.world(["a"]):
            child = psutil.Process(await call("a", actors.pid))
            stack.enter_context(frozen("a"))
            raise LookupError("in the world")
    assert not child.is_running()


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


class TestLeaks:
    """Each kind is found and named; what ends in time is not."""

    async def test_nothing(self) -> None:
        async with no_leaks(), testing.world():
            gate = await create("main", Gate)
            await remote(gate).open()
            await remote(gate).passed_in_thread()

    async def test_a_task(self) -> None:
        with pytest.raises(AssertionError, match=r"the task forgotten in .*Event\.wait"):
            async with no_leaks():
                task = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
        task.cancel()

    async def test_a_task_that_is_about_to_end(self) -> None:
        async with no_leaks():
            asyncio.create_task(asyncio.sleep(0)).add_done_callback(print)

    @pytest.mark.usefixtures("world")
    async def test_a_pending_call(self) -> None:
        gate = await create("main", Gate)
        with pytest.raises(AssertionError, match=r"; 2 pending calls$"):  # noqa: PT012
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

    async def test_a_thread_of_ours(self) -> None:
        release = threading.Event()
        thread = threading.Thread(target=release.wait, name="aiorpc-def-7")
        with pytest.raises(AssertionError, match=r"left behind: the thread aiorpc-def-7$"):
            async with no_leaks():
                thread.start()
        release.set()
        thread.join()

    async def test_a_process(self) -> None:
        with pytest.raises(AssertionError, match=r"left behind: the process \w.* \(pid \d+\)$"):
            async with no_leaks():
                process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # noqa: ASYNC220
        process.communicate()

    async def test_a_world(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            with pytest.raises(AssertionError, match="a world that was not left"):
                async with no_leaks():
                    await stack.enter_async_context(testing.world())

    @pytest.mark.worlds
    async def test_a_worker(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            with pytest.raises(AssertionError, match=r"not left; the process a \(pid \d+\)$"):
                async with no_leaks():
                    await stack.enter_async_context(testing.world(["a"]))

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
    docs = Path(__file__).parents[1] / "docs"
    assert f"::: aiorpc_torch.testing.{name}\n" in (docs / "api.md").read_text()
    if name != "Options":
        assert name in (docs / "testing.md").read_text()


# ── with hypothesis ─────────────────────────────────────────────────────────────────────────────


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.lists(st.integers()))
async def test_one_world_for_all_examples(world: aiorpc.Worker, numbers: list[int]) -> None:
    """The fixture is there once for the test: an example makes its own objects in it."""
    counter = await create(world.name, actors.Counter)
    for number in numbers:
        await remote(counter).aadd(number)
    assert await remote(counter).add(0) == sum(numbers)


class TestGarbage:
    """`freeze_gc`: what is there when a world starts is left out of collections until it ends."""

    async def test_by_default(self) -> None:
        """It is frozen inside, and thawed afterwards."""
        assert gc.get_freeze_count() == 0
        async with testing.world():
            assert gc.get_freeze_count() > 10_000
        assert gc.get_freeze_count() == 0

    async def test_on_request_it_is_not(self) -> None:
        """Nothing is frozen."""
        async with testing.world(freeze_gc=False):
            assert gc.get_freeze_count() == 0

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

    @pytest.mark.worlds
    async def test_in_children(self, workers: Workers) -> None:
        """Each process of a local world does the same."""
        await workers(["a"])
        assert await call("a", gc.get_freeze_count) > 10_000
