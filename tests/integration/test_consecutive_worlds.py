"""Worlds in a row in one process: nothing grows with their number."""

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiorpc_torch import call
from aiorpc_torch.testing import world
from tests.support import actors
from tests.support.example_programs import free_port
from tests.support.scripts import ROOT, program, run
from tests.support.slack import SLACK

# What stays of each world with torch 2.15: 2 blocks of Python's, and 18 to 31 KB outside of Python.
BLOCKS = 10  # a world
MEMORY = 40  # KB a world
STATES = 16  # of the last world's threads, which Linux may list for a moment after they are joined

ROW = """
    import ctypes, gc, json, threading, time
    from aiorpc_torch import call, create, remote
    from aiorpc_torch._torch.thread_state import pinned

    class Server:
        def plain(self):
            return 1

        async def on_the_loop(self):
            return 2

    async def life():
        async with aiorpc.local_world(0):
            server = await create("main", Server)
            await asyncio.gather(*(remote(server).plain() for _ in range(16)))
            await asyncio.gather(*(remote(server).on_the_loop() for _ in range(16)))

    def least(folder):
        "The number of its entries: Linux lists joined threads for a moment."
        return min(len(os.listdir(folder)) for _ in range(100) if not time.sleep(0.01))

    def stock():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/smaps_rollup") as lines:
            memory = [line.split()[1] for line in lines if line.startswith("Anonymous:")]
        return {
            "memory": int(memory[0]),
            "blocks": sys.getallocatedblocks(),
            "files": least("/proc/self/fd"),
            "threads": least("/proc/self/task"),
            "named": threading.active_count(),
            "states": len(pinned),
        }

    stocks = []
    for count in map(int, sys.argv[1:]):
        for _ in range(count):
            asyncio.run(life())
        stocks.append(stock())
    print(json.dumps(stocks))
"""


@pytest.mark.promise("worlds.many")
@pytest.mark.slow
def test_two_hundred_worlds(tmp_path: Path) -> None:
    """Threads, files and memory are as they were after the first seventy."""
    done = run(program(tmp_path, ROW), "70", "65", "65")
    assert done.returncode == 0, done.stderr
    before, middle, after = json.loads(done.stdout)
    assert (after["files"], after["threads"]) == (before["files"], before["threads"])
    assert after["named"] == before["named"]
    assert after["states"] <= STATES
    assert after["blocks"] - before["blocks"] < 130 * BLOCKS
    # On a busy machine the allocator may take some megabytes once: a leak grows in both halves.
    halves = middle["memory"] - before["memory"], after["memory"] - middle["memory"]
    assert min(halves) < 65 * MEMORY


async def test_torch_ends_with_its_world(no_garbage: None) -> None:
    """Its threads and sockets end without a garbage collection."""
    async with world():
        await call("main", actors.pid)
    before = stock()
    for _ in range(2):
        async with world():
            await call("main", actors.pid)
        assert await settled(before) <= before


# ── at one address ──────────────────────────────────────────────────────────────────────────────

GUEST = """
    from aiorpc_torch import call

    async def pid():
        return os.getpid()

    async def life(rank, address):
        async with aiorpc.worker(rank=rank, world_size=2, init_method=address, start_timeout=40):
            return await call(1 - rank, pid)

    address, *ranks = sys.argv[1:]
    for rank in map(int, ranks):
        print(asyncio.run(life(rank, address)), flush=True)
"""


@pytest.mark.slow
def test_worlds_at_one_tcp_address(tmp_path: Path) -> None:
    """A process meets its old peer again, then a fresh one, then a fresh rank 0."""
    script = program(tmp_path, GUEST)
    address = f"tcp://127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:

        def enters(*ranks: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-W", "error", str(script), address, *map(str, ranks)]
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        stayer = enters(0, 0, 0, 1)
        peers = []
        for ranks in ([1, 1], [1], [0]):
            guest = enters(*ranks)
            seen = guest.communicate(timeout=500)[0].split()
            assert guest.returncode == 0
            assert seen == [str(stayer.pid)] * len(ranks)
            peers += [str(guest.pid)] * len(ranks)
        assert stayer.communicate(timeout=500)[0].split() == peers
        assert stayer.returncode == 0


# ── resources ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def no_garbage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Disable garbage collection, and use a directory for temporary files of this test only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def life() -> None:
    async with world(["a"]):
        await asyncio.gather(*(call("a", actors.pid) for _ in range(8)))


def stock() -> frozenset[str]:
    folders = os.listdir(tempfile.gettempdir())
    open_files, threads = os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
    files = {f"file {number}" for number in range(len(open_files))}
    return frozenset(folders).union(files, (f"thread {number}" for number in range(len(threads))))


async def settled(most: frozenset[str]) -> frozenset[str]:
    """Return the stock once it is at most that: Linux lists joined threads for a moment."""
    end = time.monotonic() + SLACK
    while not stock() <= most and time.monotonic() < end:  # noqa: ASYNC110 - Linux tells nobody
        await asyncio.sleep(0.01)
    return stock()
