"""What every test gets: its world if it asks for one, and a look at what it left behind."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two cores, and several workers

import psutil
import pytest
from doors import door as door
from doors import skip as skip
from hypothesis import settings

import aiorpc_torch as aiorpc

settings.register_profile("fast", deadline=None, max_examples=100)
settings.register_profile("long", deadline=None, max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture
async def world() -> AsyncIterator[aiorpc.Worker]:
    """A world of one: real pickling and threads, no second process."""
    async with aiorpc.local_world(0) as me:
        yield me


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No thread of ours and no child process outlives a test."""
    threads, children = set(_threads()), set(_children())
    yield
    left = [thread for thread in set(_threads()) - threads if not _ends(thread)]
    assert not left, f"threads left: {left}"
    processes, _ = psutil.wait_procs(set(_children()) - children, timeout=2.0), None
    assert not processes[1], f"processes left: {processes[1]}"


@pytest.fixture(autouse=True)
async def _no_task_left() -> AsyncIterator[None]:
    """No task outlives a test."""
    before = asyncio.all_tasks()
    yield
    left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
    await asyncio.sleep(0)
    left = {task for task in left if not task.done()}
    assert not left, f"tasks left: {left}"


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("aiorpc")]


def _ends(thread: threading.Thread) -> bool:
    thread.join(1.0)
    return not thread.is_alive()


def _children() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            tracker = "resource_tracker" in " ".join(process.cmdline())
        except psutil.Error:  # it ended meanwhile
            continue
        if not tracker and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found
