"""Forked children and their server, seen from inside."""

import asyncio
import os
import select
import socket
import sys
from pathlib import Path

import pytest
import torch

from aiorpc_torch import local_world
from aiorpc_torch._children import child, forkserver, process_table
from aiorpc_torch._torch import agent


def check_tensors(tensors: list[torch.Tensor]) -> None:
    sys.exit(0 if [int(each) for each in tensors] == [*range(300)] else 3)


async def test_a_child_gets_any_number_of_tensors() -> None:
    """Each is a descriptor, and one message takes 253."""
    forks = forkserver.obtain(())
    await forks.ready(500.0)
    process = forks.process(check_tensors, ([torch.tensor(n) for n in range(300)],), "tensors")
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.slow
async def test_a_fork_of_the_program_ends_nothing_at_its_exit() -> None:
    """Its exit functions kill no worker, and do not wait for threads that it has not."""
    async with local_world(["a"]):
        assert child._running
        if (pid := os.fork()) == 0:
            os._exit(bool(child._running) or agent._needs_stop)
        assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0)


@pytest.mark.slow
def test_a_process_name_that_is_no_text() -> None:
    """Linux cuts names to 15 bytes, perhaps inside a character; they stand in /proc."""
    name, before = Path("/proc/self/comm"), Path("/proc/self/comm").read_bytes()
    name.write_bytes("fünfzehn Zeiche".encode("latin-1"))
    try:
        assert forkserver.inherited_state()["umask"]
        assert not process_table.is_exiting(os.getpid())
    finally:
        name.write_bytes(before)


@pytest.mark.slow
def test_a_server_whose_program_ends_while_it_starts(capfd: pytest.CaptureFixture[str]) -> None:
    """It ends in silence: before its report that it is ready, and after, if that was not read."""
    ends, pids = [], []
    for _ in range(2):
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            pids.append(forkserver._start(theirs.fileno(), sys.path, ()))
        ends.append(mine)
    ends[0].close()
    assert select.select([ends[1]], [], [], 500)[0], "it has sent its report"
    ends[1].close()
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert capfd.readouterr().err == ""


def test_a_server_that_was_just_killed_serves_no_world() -> None:
    """Nor forks a child, not in the moment either in which the process has not ended yet."""
    killed = forkserver.ForkServer(())
    assert killed.serves(())
    killed.kill()
    assert not killed.serves(())
    assert not killed.is_alive()
