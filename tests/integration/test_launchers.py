"""Workers that find their world in the environment of Slurm or Kubernetes, on one host."""

import contextlib
import sys

import pytest

from tests.support.example_programs import PATIENCE, free_port, started

SIZE = 2
PROGRAM = """
import asyncio, os, sys
import aiorpc_torch as aiorpc

async def main():
    async with aiorpc.worker() as me:
        pid = await aiorpc.call(me.peers[0], os.getpid)
        sys.stdout.write(f"{me.name} of {me.world_size} {pid}")

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables come first, and the tests themselves may run under it."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def check_world(rank: str, environment: dict[str, str]) -> None:
    """Each worker calls the other one."""
    with contextlib.ExitStack() as stack:
        line = [sys.executable, "-c", PROGRAM]
        first, second = (
            stack.enter_context(started(line, **environment, **{rank: str(number)}))
            for number in range(SIZE)
        )
        found = [each.communicate(timeout=PATIENCE) for each in (first, second)]
    assert [output for output, _ in found] == [
        f"worker0 of 2 {second.pid}",
        f"worker1 of 2 {first.pid}",
    ], found


@pytest.mark.promise("worlds.launchers")
@pytest.mark.slow
def test_pods_of_an_indexed_job() -> None:
    """Two pods, with the two lines of the manifest that a pod cannot know by itself."""
    pod = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    check_world("JOB_COMPLETION_INDEX", pod)
