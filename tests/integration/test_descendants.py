"""Processes that a child has started: none outlives the child, however that ends."""

import asyncio
import multiprocessing
import os
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import WorkerLost
from aiorpc_torch.types import Worker
from tests.support import samples
from tests.support.two_ends import until

_kept: list[Any] = []


def hang(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(600)


def start_processes(kind: str, folder: Path) -> None:
    """Start two processes that do not end."""
    if kind == "subprocesses":
        command = ["sh", "-c", f"touch {folder}/$$; sleep 600 & wait"]
        _kept.extend(subprocess.Popen(command) for _ in range(2))
        return
    context = multiprocessing.get_context("fork" if kind == "forks" else "spawn")
    if kind == "pool":
        pool = ProcessPoolExecutor(2, mp_context=context)
        _kept.extend([pool, *[pool.submit(hang, folder) for _ in range(2)]])
        return
    for _ in range(2):
        process = context.Process(target=hang, args=(folder,))
        process.start()
        _kept.append(process)


async def end(me: Worker, kind: str, how: str, folder: Path) -> None:
    """Rank 1 starts processes, and ends; rank 0 waits, or ends itself."""
    if me.rank == 1:
        start_processes(kind, folder)
        await until(lambda: len([*folder.iterdir()]) == 2)
        (folder / "all").touch()
        if how == "it raises":
            raise ValueError("odd")
        if how == "it is killed":
            os.kill(os.getpid(), 9)
    if how == "its parent raises":
        await until((folder / "all").exists)
        raise ValueError("odd")
    await asyncio.sleep(600)


KINDS = ["pool", "forks", "processes", "subprocesses"]
ENDS = ["it raises", "it is killed", "its parent raises"]
QUICK = {("forks", "it is killed")}


@pytest.mark.promise("worlds.descendants")
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(
            kind, how, marks=() if (kind, how) in QUICK else samples.mark(row, column, of=3)
        )
        for row, kind in enumerate(KINDS)
        for column, how in enumerate(ENDS)
    ],
)
def test_a_child_ends_with_what_it_has_started(kind: str, how: str, tmp_path: Path) -> None:
    """The exception is raised at once, and the processes are gone."""
    with pytest.raises((ValueError, WorkerLost)):
        aiorpc.run_local(end, 2, args=(kind, how, tmp_path))
    pids = [int(each.name) for each in tmp_path.iterdir() if each.name != "all"]
    assert len(pids) == 2
    gone = time.monotonic() + 20.0
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < gone, alive
        time.sleep(0.01)


def start_in_background() -> int:
    """Start a process whose parent ends at once."""
    command = "sleep 600 >/dev/null 2>&1 & echo $!"
    return int(subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout)


@pytest.mark.promise("worlds.descendants")
@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
async def test_a_process_in_the_background_ends_with_its_own_child(start: Any) -> None:
    """The end of another child does not end it, and its own child may die in any way."""
    async with aiorpc.local_world(["a", "b"], start=start) as me:
        background = {each: await aiorpc.call(each, start_in_background) for each in "ab"}
        os.kill(await aiorpc.call("a", os.getpid), 9)
        await until(lambda: not is_alive(background["a"]))
        assert is_alive(background["b"])
        await me.stop("b")
        await until(lambda: not is_alive(background["b"]))


async def cancel_itself(me: Worker) -> None:
    if me.rank:
        raise asyncio.CancelledError
    await asyncio.sleep(600)


@pytest.mark.promise("worlds.failure")
def test_a_main_that_raises_a_cancellation() -> None:
    """Nobody has told it to stop, so it has failed."""
    with pytest.raises(aiorpc.RemoteError, match="CancelledError"):
        aiorpc.run_local(cancel_itself, 2)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
