"""How programs start, other than in a local world: each worker by itself."""

import os
import subprocess
import sys

import pytest

from tests.support.example_programs import ROOT, free_port

PROGRAM = """
import argparse, asyncio, functools, os
import aiorpc_torch as aiorpc
from examples._launch import add_world, launch

# What a worker waits if `launch` does not say more: less than this test.
aiorpc.worker = functools.partial(aiorpc.worker, stop_timeout=0.1)

async def main(me, options):
    if me.rank == 0:
        await asyncio.sleep(2)
        return await aiorpc.call("ps", os.getpid)

parser = argparse.ArgumentParser()
add_world(parser)
options = parser.parse_args()
print(launch(main, ["trainer", "ps"], options))
"""


@pytest.mark.promise("worlds.exit", "worlds.run_local")
@pytest.mark.slow
def test_who_is_done_serves_the_others() -> None:
    """A parameter server, whose `main` does nothing, is there for as long as a trainer works."""
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--rank", str(rank), "--master-port", port],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
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
