"""Children that are restarted: on demand, after failures in a row, and without a fork server."""

import asyncio
import gc
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import NotInWorld, UnknownWorker, WorkerGone, WorkerLost, call, remote
from aiorpc_torch.testing import world
from aiorpc_torch.types import Worker
from tests.support.fork_servers import server
from tests.support.hanging import hang, pid
from tests.support.two_ends import until

SOON = 30.0


class Env:
    async def pid(self) -> int:
        return os.getpid()


async def kill() -> None:
    os.kill(await call("a", pid), signal.SIGKILL)
    with pytest.raises(WorkerLost, match="its process was killed by SIGKILL"):
        await call("a", asyncio.sleep, 600)


@pytest.mark.promise("rejoin.on_demand")
@pytest.mark.parametrize("how", ["it serves", "frozen", "its loop is blocked", "it keeps the GIL"])
async def test_a_child_is_restarted_on_demand(how: str, tmp_path: Path) -> None:
    """Whatever its state; that does not count, and its supervised object is made again."""
    async with asyncio.timeout(SOON), world(["a", "b"], max_restarts=1) as me:
        env = await aiorpc.supervised("a", Env)
        before = await call("a", pid)
        hanging = None if how == "it serves" else await hang("a", how, tmp_path / "begun")
        for _ in range(2):
            await me.restart("a")
        if hanging is not None:
            with pytest.raises(WorkerLost, match=r"ended by restart\(\); .* may have run"):
                await hanging
        assert await remote(env).pid() == await call("a", pid) != before
        await kill()
        await me.wait_for("a")
        assert await call("b", abs, -1) == 1


@pytest.mark.promise("rejoin.on_demand")
async def test_a_child_that_is_not_restarted_any_more() -> None:
    """`restart` starts one all the same, and its object; a name that is no peer's is refused."""
    async with asyncio.timeout(SOON), world(["a"], max_restarts=1) as me:
        env = await aiorpc.supervised("a", Env)
        await kill()
        await me.wait_for("a")
        await kill()
        for _ in range(2):
            with pytest.raises(WorkerLost, match="it is not restarted"):
                await remote(env).pid()
        await me.restart("a")
        assert await remote(env).pid() == await call("a", pid)
        with pytest.raises(UnknownWorker, match="name must be one of a"):
            await me.restart("main")
    with pytest.raises(NotInWorld):
        await me.restart("a")


async def restart_another(me: Worker, folder: Path) -> int:
    """Rank 1 restarts rank 2, whose event loop is blocked."""
    if me.name == "worker2" and not me.restarts:
        (folder / "blocked").touch()
        time.sleep(600)  # noqa: ASYNC251
    if me.name == "worker1":
        await until((folder / "blocked").exists)
        await me.restart("worker2")
        (folder / "done").touch()
    await until((folder / "done").exists)
    return me.restarts


@pytest.mark.promise("rejoin.on_demand")
def test_a_worker_restarts_the_child_of_another_process(tmp_path: Path) -> None:
    """It is told to end, also if its loop is blocked, and its parent starts it again."""
    aiorpc.run_local(restart_another, 3, args=(tmp_path,), max_restarts=1)
    assert (tmp_path / "done").exists()


@pytest.mark.promise("rejoin.on_demand")
@pytest.mark.parametrize("steps", ["stop and restart", "restart and stop"])
@pytest.mark.parametrize("pause", [0.0, 0.02])
async def test_a_child_is_stopped_and_restarted_at_once(steps: str, pause: float) -> None:
    """Both end; whichever was last counts, unless the child had left before."""
    async with asyncio.timeout(SOON), world(["a"]) as me:
        first, second = (getattr(me, each) for each in steps.split(" and "))
        running = asyncio.create_task(first("a"))
        await asyncio.sleep(pause)
        ends = await asyncio.gather(running, second("a"), return_exceptions=True)
        assert all(isinstance(end, WorkerGone | ValueError | None) for end in ends)
        if "a" not in me.peers:
            await me.start("a")
        elif steps == "restart and stop" and ends[1] is None:
            with pytest.raises(WorkerLost):
                await me.wait_for("a")
            await me.start("a")
        assert await call("a", abs, -1) == 1


@pytest.mark.promise("rejoin.on_demand")
@pytest.mark.parametrize("is_given_up", [False, True])
async def test_restarts_at_once_are_one(*, is_given_up: bool) -> None:
    """Each returns when the new process has entered."""
    async with asyncio.timeout(SOON), world(["a"], max_restarts=0) as me:
        if is_given_up:
            await kill()
        await asyncio.gather(*(me.restart("a") for _ in range(3)))
        first = await call("a", pid)
        await asyncio.gather(*(me.restart("a") for _ in range(3)))
        assert await call("a", pid) != first


@pytest.mark.promise("rejoin.frozen_server")
async def test_children_that_start_at_once_have_one_server() -> None:
    """Also if there is none when the first one starts."""
    server().kill()
    async with asyncio.timeout(4 * SOON), world() as me:
        await asyncio.gather(*(me.start(each) for each in "abc"))
        found = psutil.Process().children()
        lines = [each.cmdline() for each in found if each.status() != psutil.STATUS_ZOMBIE]
        assert len([line for line in lines if "forkserver_main" in str(line)]) == 1
        assert [await call(each, abs, -1) for each in "abc"] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.promise("rejoin.flat")
async def test_restarts_and_deaths_leave_nothing() -> None:
    """Neither descriptors nor threads are left at their parent."""
    process = psutil.Process()

    def held() -> tuple[int, int]:
        gc.collect()
        return process.num_fds(), process.num_threads()

    async with asyncio.timeout(4 * SOON), world(["a"], max_restarts=1000) as me:
        before = (0, 0)
        for count in range(60):
            await me.restart("a")
            await kill()
            await me.restart("a")  # in the pause before the next restart
            if count == 20:
                before = held()
        await until(lambda: held() <= before)


# ── failures in a row ───────────────────────────────────────────────────────────────────────────


def fail_while_it_exists(name: str) -> None:
    """Initialize a child, and note its start."""
    fails = os.path.exists(os.environ["FAILS"])
    with open(os.environ["STARTS"], "a") as starts:
        starts.write(name)
    if fails:
        raise ValueError("odd")


@pytest.mark.promise("rejoin.pauses")
async def test_a_child_that_fails_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its restarts pause; `stop`, `start` and `restart` do not wait for the pause."""
    starts, fails = tmp_path / "starts", tmp_path / "fails"
    monkeypatch.setenv("STARTS", str(starts))
    monkeypatch.setenv("FAILS", str(fails))
    options = {"max_restarts": 100, "initializer": fail_while_it_exists, "logs": None}
    async with asyncio.timeout(SOON), world(["a"], **options) as me:  # type: ignore[arg-type]
        failed: list[str] = []

        async def fail() -> None:
            starts.write_text("")
            fails.touch()
            await kill()
            await until(lambda: caplog.text.count(" s: odd") > len(failed))
            failed.append("again")
            fails.unlink()

        begin = time.monotonic()
        await fail()
        await me.wait_for("a")
        # Pauses of 0, 0.1, 0.2, 0.4, ... seconds.
        assert len(starts.read_text()) < 10 * (0.2 + time.monotonic() - begin)
        for step in (me.restart, me.start):
            await fail()
            await step("a")
            assert await call("a", abs, -1) == 1
        await kill()
        await me.stop("a")  # in a pause of some seconds
        with pytest.raises(WorkerLost):
            await me.wait_for("a")


# ── a fork server that is frozen ────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.promise("rejoin.frozen_server")
async def test_children_whose_server_is_frozen() -> None:
    """They end, are restarted, and others start, while the event loop of their parent is free."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            begin = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - begin)

    async with asyncio.timeout(10 * SOON), world(["a"], max_restarts=1) as me:
        watching = asyncio.create_task(watch())
        server().suspend()
        await kill()
        await me.wait_for("a")
        server().suspend()
        await me.start("c")
        server().suspend()
        await me.stop("c")
        assert await call("a", abs, -1) == 1
        watching.cancel()
    assert longest < 4.0  # less than the server is waited for
