"""Workers that are started one by one, in the environment that torchrun sets."""

import os
import subprocess
import sys

import pytest

from tests.support.example_programs import ROOT, free_port

TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}

PROGRAM = """
import asyncio, os
import aiorpc_torch as aiorpc

async def main():
    rank = int(os.environ["RANK"])
    async with aiorpc.worker("ps" if rank else "trainer") as me:
        if rank == 0:
            await asyncio.sleep(2)
            return await aiorpc.call("ps", os.getpid)

print(asyncio.run(main()))
"""


@pytest.mark.promise("worlds.exit", "worlds.run_local")
@pytest.mark.slow
def test_who_is_done_serves_the_others() -> None:
    """A parameter server, whose `main` does nothing, is there for as long as a trainer works."""
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **TORCHRUN, "MASTER_PORT": port, "RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        (trained, *_), (served, *_) = [worker.communicate(timeout=500) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], trained + served
    assert (trained, served) == (f"{workers[1].pid}\n", "None\n")
