"""Rejoins: the callers of a restarted worker, and the workers beside it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import WorkerLost, call, create, fetch, remote
from aiorpc_torch.testing import Gate, frozen, kill, world
from tests.support import actors
from tests.support.actors import Batching, Counter, Sleeper
from tests.support.scripts import program, run, started


async def lost(awaitable: Any) -> WorkerLost:
    with pytest.raises(WorkerLost) as raised:
        await awaitable
    return raised.value


@pytest.mark.promise("rejoin.restart", "rejoin.objects")
async def test_a_child_rejoins() -> None:
    """It rejoins twice. Its callers get WorkerLost and may wait; other objects stay."""
    async with world(["a", "b"], max_restarts=2) as me:
        gone, kept = await create("a", Counter, start=1), await create("b", Counter, start=2)
        far = await create("b", Batching)
        assert await call("b", actors.call_on, gone, "add", 0) == 1  # b knows a, and the object
        for count in (1, 2):
            # A worker that is killed while it connects would end its peer's listener.
            assert await call("a", actors.ask_back, "b") == "b"
            pending = asyncio.create_task(call("a", asyncio.sleep, 600))
            old = await call("a", actors.pid)
            kill("a")
            error = await lost(pending)
            assert error.worker == "a"
            async with asyncio.timeout(30.0):
                await me.wait_for("a")
            assert await call("a", actors.pid) != old
            # Each calls each, in both directions.
            assert await call("a", actors.ask_back, "b") == "b"
            assert await call("b", actors.ask_back, "a") == "a"
            # The old process's objects are gone, and their RRefs cannot be passed on.
            assert "this RRef belongs to its old process" in str(await lost(remote(gone).add(1)))
            with pytest.raises(ReferenceError, match="worker 'a', which is lost"):
                await call("b", actors.try_on, gone, "add", 1)
            # Other workers' objects stay, and can be passed to the new process.
            assert await remote(kept).add(1) == 2 + count
            assert await call("a", actors.call_on, kept, "add", 0) == 2 + count
            gone = await create("a", Counter, start=10)
            assert await call("b", actors.call_on, gone, "add", 1) == 11
            assert (await fetch(gone)).value == 11
            # A batch of three takes one call of the new process.
            sums = await asyncio.gather(
                remote(far).total(1),
                call("a", actors.call_on, far, "total", 2),
                remote(far).total(3),
            )
            assert sums == [6, 6, 6]
        assert aiorpc.observe.stats().in_flight == 0


@pytest.mark.promise("rejoin.restart", "rejoin.wait_for")
async def test_restarts_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    """After the last restart `wait_for` raises WorkerLost. One line of the log tells of each."""
    async with world(["a"], max_restarts=1) as me:
        await me.wait_for("a")  # it is here
        for _ in range(2):
            kill("a")
            await lost(call("a", asyncio.sleep, 600))
            async with asyncio.timeout(30.0):
                error = await wait_for(me, "a")
        assert isinstance(error, WorkerLost)
        assert error.worker == "a"
        with pytest.raises(ValueError, match="peer must be one of a, got 'nobody'"):
            await me.wait_for("nobody")
    [restarted] = [each for each in caplog.records if "is restarted:" in each.getMessage()]
    assert restarted.getMessage() == "worker 'a' is restarted: its process was killed by SIGKILL"
    assert not restarted.exc_info, "the exception would say the same"


async def test_restarts_leave_no_descriptors() -> None:
    """Each closes the pipes of the process that ended."""
    async with world(["a"], max_restarts=3) as me:
        counts = []
        for _ in range(3):
            kill("a")
            await lost(call("a", asyncio.sleep, 600))
            async with asyncio.timeout(30.0):
                await me.wait_for("a")
            await call("a", actors.pid)
            counts.append(len(os.listdir("/proc/self/fd")))
        async with asyncio.timeout(30.0):  # torch closes those of its pipes in its own thread
            while len(os.listdir("/proc/self/fd")) > counts[0]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def wait_for(me: aiorpc.types.Worker, name: str) -> WorkerLost | None:
    try:
        return await me.wait_for(name)
    except WorkerLost as error:
        return error


@pytest.mark.promise("rejoin.wait_for")
async def test_waiting_for_an_unreachable_worker() -> None:
    """The wait ends with its next sign of life, and its objects are still there."""
    async with world(["a"], heartbeat=1.0, transports=["uv"]) as me:
        counter, gate = await create("a", Counter, start=7), await create("a", Gate)
        pending = asyncio.create_task(remote(gate).passed())
        await remote(gate).entered()
        with frozen("a"):
            await lost(pending)
            waiting = asyncio.create_task(me.wait_for("a"))
            await asyncio.sleep(0)
            assert not waiting.done()
        asking = asyncio.create_task(remote(counter).add(1))
        async with asyncio.timeout(30.0):
            await waiting
            assert await asking == 8


@pytest.mark.promise("rejoin.undisturbed")
async def test_a_rejoin_while_others_work() -> None:
    """Calls between the other workers go on, each answered once."""
    async with world(["a", "b"], max_restarts=1) as me:
        sleeper, counter = await create("b", Sleeper), await create("b", Counter, start=0)
        done, stop = 0, asyncio.Event()

        async def work() -> None:
            nonlocal done
            while not stop.is_set():
                await asyncio.gather(*(remote(sleeper).sleep(0) for _ in range(20)))
                await remote(counter).add(1)
                done += 1

        working = asyncio.create_task(work())
        kill("a")
        await lost(call("a", asyncio.sleep, 600))
        async with asyncio.timeout(30.0):
            await me.wait_for("a")
        stop.set()
        await working
        assert await remote(counter).add(0) == done > 0


@pytest.mark.slow
def test_run_local_restarts_main(tmp_path: Path) -> None:
    """It restarts after an exception and after a death, with `me.restarts` above 0."""
    path = program(
        tmp_path,
        """
        arrived = []
        def arrive(comeback):
            arrived.append(comeback)
        async def main(me):
            if me.name == "trainer":
                if me.restarts == 0:
                    raise LookupError("first")
                if me.restarts == 1:
                    os._exit(9)
                return await aiorpc.call("ps", arrive, me.restarts)
            while not arrived:
                try:
                    await aiorpc.call("trainer", asyncio.sleep, 0.01)
                except aiorpc.WorkerLost as lost:
                    await me.wait_for(lost.worker)
            return arrived
        if __name__ == "__main__":
            print(aiorpc.run_local(main, ["ps", "trainer"], max_restarts=2))
        """,
    )
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2]\n"
    assert "LookupError: first" in done.stderr, "its traceback is in the log"
    assert "ended with exit code 9" in done.stderr


@pytest.mark.promise("worlds.on_failure")
@pytest.mark.slow
def test_run_local_goes_on_without_a_worker(tmp_path: Path) -> None:
    """With `on_failure="continue"` the others finish, and then the failure is raised."""
    path = program(
        tmp_path,
        """
        async def main(me):
            if me.name == "b":
                raise LookupError("b's own")
            try:
                await aiorpc.call("b", asyncio.sleep, 600)
            except aiorpc.WorkerLost as lost:
                os.write(1, f"{me.name}: {lost} / {lost.__cause__ is not None}\\n".encode())
            await asyncio.gather(*(aiorpc.call(n, asyncio.sleep, 0) for n in ("a", "c")))
        if __name__ == "__main__":
            aiorpc.run_local(main, ["a", "b", "c"], on_failure="continue")
        """,
    )
    done = run(path)
    lines = sorted(done.stdout.splitlines())
    assert [line[:22] for line in lines] == ["a: worker 'b' is lost:", "c: worker 'b' is lost:"]
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "LookupError: b's own"


@pytest.mark.promise("worlds.on_failure")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_failure_stops_the_others(tmp_path: Path, how: str) -> None:
    """`worker(on_failure="stop")`, in processes without a supervisor."""
    path = program(
        tmp_path,
        """
        async def main(rank, where, how):
            async with aiorpc.worker(
                rank=rank, world_size=3, init_method=where, on_failure="stop"
            ) as me:
                # All have started before one fails.
                await asyncio.gather(*(aiorpc.call(peer, os.getpid) for peer in me.peers))
                if rank == 1:
                    if how == "die":
                        os._exit(9)
                    raise LookupError("of rank 1")
                await asyncio.sleep(600)
        if __name__ == "__main__":
            asyncio.run(main(int(sys.argv[1]), *sys.argv[2:]))
        """,
    )

    def live(rank: int) -> Any:
        return run(path, str(rank), f"file://{tmp_path}/store", how)

    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(live, range(3)))
    for rank in (0, 2):
        assert ends[rank].returncode == 1
        last = ends[rank].stderr.splitlines()[-1]
        # Or the other worker, which ended first because of it.
        assert last.startswith("aiorpc_torch.WorkerLost: worker '"), last
        assert "worker 'worker1' is lost: " in last
        if how == "raise":
            assert last.endswith("its block raised LookupError: of rank 1")
            assert "aiorpc_torch.types.RemoteTraceback: on worker 'worker1'" in ends[rank].stderr
    assert ends[1].returncode == (1 if how == "raise" else 9)


# ── processes without a supervisor ──────────────────────────────────────────────────────────────

ALONE = """
    async def main(rank, where):
        # No peer is lost for silence while a second process starts.
        async with aiorpc.worker(
            rank=rank, world_size=3, init_method=where, heartbeat=60
        ) as me:
            os.write(1, f"{me.name} {os.getpid()} {me.restarts}\\n".encode())
            if rank == 0:
                try:
                    await aiorpc.call(1, asyncio.sleep, 600)
                except aiorpc.WorkerLost as lost:
                    os.write(1, b"lost\\n")
                await me.wait_for("worker1")
                os.write(1, f"back {await aiorpc.call(1, os.getpid)}\\n".encode())
            else:
                try:
                    await aiorpc.call(0, asyncio.sleep, 600)
                except Exception as exc:
                    os.write(1, f"{type(exc).__name__}: {exc}\\n".encode())
                    await me.serve()
    if __name__ == "__main__":
        asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
"""


@contextlib.contextmanager
def three(tmp_path: Path) -> Iterator[tuple[Path, str, list["subprocess.Popen[str]"]]]:
    """Start a world of three processes as a shell would."""
    path, where = program(tmp_path, ALONE), f"file://{tmp_path}/store"
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(started(path, str(rank), where)) for rank in range(3)]
        for rank, process in enumerate(found):
            assert line(process).split() == [f"worker{rank}", str(process.pid), "0"]
        yield path, where, found


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.promise("rejoin.machines")
@pytest.mark.slow
def test_a_restarted_process_rejoins(tmp_path: Path) -> None:
    """It replaces a dead process only."""
    with three(tmp_path) as (path, where, found):
        with started(path, "1", where) as second:
            _, errors = second.communicate(timeout=500)
        assert second.returncode == 1
        host = socket.gethostname()
        assert errors.splitlines()[-1] == (
            "ValueError: two workers have the name 'worker1': the first one is alive, 'worker1' "
            f"(rank 1, process {found[1].pid} on {host}). Wait until it has ended, or end it, "
            f"before 'worker1' (rank 1, process {second.pid} on {host}) enters"
        )
        found[1].kill()
        assert line(found[0]) == "lost\n"
        with started(path, "1", where) as third:
            assert line(third).split() == ["worker1", str(third.pid), "1"]
            assert line(found[0]) == f"back {third.pid}\n"


@pytest.mark.promise("rejoin.replaced")
@pytest.mark.slow
def test_a_replaced_process_is_not_served(tmp_path: Path) -> None:
    """A frozen process that was replaced gets NotInWorld when it thaws, and serves no longer."""
    with three(tmp_path) as (path, where, found):
        found[1].send_signal(signal.SIGSTOP)
        try:
            with started(path, "1", where) as second:
                assert line(second).split() == ["worker1", str(second.pid), "1"]
                assert line(found[0]) == "lost\n"
                assert line(found[0]) == f"back {second.pid}\n"
                found[1].send_signal(signal.SIGCONT)
                assert line(found[1]) == (
                    "NotInWorld: worker 'worker1' was restarted: a newer process has replaced "
                    "this one\n"
                )
                _, errors = found[1].communicate(timeout=500)
                assert errors.splitlines()[-1] == (
                    "aiorpc_torch.NotInWorld: worker1 is in its world no more: another process has "
                    "replaced this one"
                )
                assert found[1].returncode == 1
        finally:
            found[1].kill()


async def test_a_foreign_connection_ends_a_listener() -> None:
    """A foreign connection to torch's port locks out peers without a connection."""
    async with world(["a", "b"], transports=["uv"], stop_timeout=1.0):
        host, _, port = (await call("a", actors.address)).removeprefix("uv://").rpartition(":")
        socket.create_connection((host, int(port)), 5.0).close()
        assert await call("a", actors.pid), "the existing connection goes on"
        with pytest.raises((aiorpc.CallTimeout, WorkerLost)), aiorpc.timeout(1.0):
            await call("b", actors.ask_back, "a")
