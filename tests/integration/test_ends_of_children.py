"""Children that hang or are frozen: each end is bounded, and their names are free afterwards."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import NotInWorld, WorkerLost, call
from aiorpc_torch.testing import world
from aiorpc_torch.types import Worker
from tests.support.hanging import hang, pid
from tests.support.slack import SLACK

SOON, LONG = 30.0, 3600.0


@pytest.mark.promise("joining.stop_hanging")
@pytest.mark.parametrize("how", ["frozen", "its loop is blocked", "it keeps the GIL"])
@pytest.mark.parametrize(
    "is_cancelled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "cancelled"]
)
async def test_a_child_that_hangs_is_stopped(how: str, is_cancelled: bool, tmp_path: Path) -> None:
    """It is killed after its time, also if `stop` is cancelled; a new one may have its name."""
    async with asyncio.timeout(SOON), world(["a", "b"], stop_timeout=0.1) as me:
        hanging = await hang("a", how, tmp_path / "begun")
        stopping = asyncio.create_task(me.stop("a"))
        if is_cancelled:
            await asyncio.sleep(0)
            stopping.cancel()
            with pytest.raises(WorkerLost):
                await call("a", pid)
        else:
            await stopping
        if hanging is not None:
            with pytest.raises(WorkerLost, match=r"did not leave .* may have run"):
                await hanging
        await me.start("a")
        assert await call("a", abs, -1) == 1
        assert await call("b", abs, -2) == 2


@pytest.mark.promise("rejoin.watchdog")
@pytest.mark.parametrize(
    "how", [pytest.param("its loop is blocked", marks=pytest.mark.slow), "it keeps the GIL"]
)
async def test_a_child_with_a_watchdog(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends, tells where it stood, and is started again; a plain `def` may take its time."""
    options = {"watchdog": 1.0, "max_restarts": 1, "logs": None}
    async with asyncio.timeout(SOON), world(["a"], **options) as me:  # type: ignore[arg-type]
        assert await call("a", time.sleep, 1.5) is None
        hanging = await hang("a", how, tmp_path / "begun")
        assert hanging is not None
        with pytest.raises(WorkerLost, match="exit code 1, as its watchdog ends it"):
            await hanging
        await me.wait_for("a")
        assert await call("a", abs, -1) == 1
    name = "block_the_loop" if how == "its loop is blocked" else "keep_the_gil"
    assert f"in {name}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("soon", "AIORPC_TORCH_WATCHDOG must be a number of seconds, got 'soon'"),
        ("0.25", "watchdog must be None or a finite number .* got 0.25"),
    ],
)
async def test_a_watchdog_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, error: str
) -> None:
    """A number of seconds, unless the argument gives one."""
    monkeypatch.setenv("AIORPC_TORCH_WATCHDOG", text)
    with pytest.raises(ValueError, match=error):
        async with world():
            pass
    async with world(watchdog=LONG):
        pass


@pytest.mark.parametrize("seconds", [0.5, float("nan"), float("inf"), -1])
async def test_an_unusable_watchdog(seconds: float) -> None:
    """It is refused before anything starts."""
    with pytest.raises(ValueError, match="watchdog must be None or a finite number"):
        async with world(watchdog=seconds):
            pass


async def end_quietly() -> None:
    """As a library does whose C code calls `exit(0)`."""
    os._exit(0)


@pytest.mark.promise("rejoin.exit_0")
async def test_a_child_that_ends_with_exit_code_0() -> None:
    """Inside its world: it has died as any other, is restarted, and then given up."""
    async with asyncio.timeout(SOON), world(["a"], max_restarts=1) as me:
        for restarts in range(2):
            with pytest.raises(WorkerLost, match=r"ended with exit code 0; .*end_quietly"):
                await call("a", end_quietly)
            if not restarts:
                await me.wait_for("a")
                assert await call("a", abs, -1) == 1
        with pytest.raises(WorkerLost, match="it is not restarted"):
            await me.wait_for("a")


async def exit_with(me: Worker, code: int | None, how: str) -> str:
    """End the worker of rank 1."""
    if me.rank == 1 and how == "sys.exit":
        sys.exit(code)
    if me.rank == 1:
        os._exit(code or 0)
    await me.serve("worker1")
    return "done"


@pytest.mark.promise("rejoin.exit_0")
@pytest.mark.parametrize("code", [0, None])
def test_a_main_that_exits_in_order(code: int | None) -> None:
    """As if it had returned."""
    assert aiorpc.run_local(exit_with, 2, args=(code, "sys.exit")) == "done"


@pytest.mark.promise("rejoin.exit_0")
@pytest.mark.parametrize("code", [0, 87])
def test_a_main_whose_process_ends(code: int) -> None:
    """It has not left in order, whatever its exit code. That of a missing guard is as any other."""
    with pytest.raises(WorkerLost, match=f"its process ended with exit code {code}"):
        aiorpc.run_local(exit_with, 2, args=(code, "os._exit"))


@pytest.mark.promise("joining.thaws")
async def test_a_frozen_child_that_thaws_while_another_is_started() -> None:
    """The other one is refused: the first has the name."""
    async with asyncio.timeout(SOON), world(["a"], heartbeat=1.0) as me:
        number = await call("a", pid)
        os.kill(number, signal.SIGSTOP)
        with pytest.raises(WorkerLost):
            await call("a", pid)
        starting = asyncio.create_task(me.start("a"))
        await asyncio.sleep(0)
        os.kill(number, signal.SIGCONT)
        with pytest.raises(ValueError, match="'a'"):
            await starting
        assert await call("a", pid) == number


async def test_a_world_with_a_frozen_child_is_left() -> None:
    """The child is killed soon after it is lost."""
    async with world(["a"], heartbeat=1.0, stop_timeout=1.0) as me:
        number = await call("a", pid)
        os.kill(number, signal.SIGSTOP)
        with pytest.raises(WorkerLost):
            await call("a", pid)
        leaving = time.monotonic()
    assert time.monotonic() - leaving < 1.0 + SLACK
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    for step in (me.start, me.stop):
        with pytest.raises(NotInWorld, match="has left its world"):
            await step("c")
