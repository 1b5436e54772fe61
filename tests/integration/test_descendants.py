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
QUICK = {("forks", end) for end in ENDS} | {("pool", "it raises")}


@pytest.mark.promise("worlds.descendants")
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(kind, how, marks=() if (kind, how) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for how in ENDS
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


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
