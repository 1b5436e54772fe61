"""An event loop that stands in a collective of `torch.distributed`."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.example_programs import PATIENCE, started

from .test_launchers import no_torchrun
from .test_process_groups import address

__all__ = ["no_torchrun"]

PROGRAM = """
import asyncio, os, sys
import torch, torch.distributed as dist
import aiorpc_torch as aiorpc

def add():
    return dist.all_reduce(torch.ones(1))

def wait():
    with open(sys.argv[1]) as gate:
        gate.read()

async def main():
    async with aiorpc.worker() as me:
        await asyncio.to_thread(dist.init_process_group, "gloo")
        if me.rank == 0:
            add()
        else:
            await asyncio.to_thread(wait)
            await asyncio.to_thread(add)
    dist.destroy_process_group()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.promise("worlds.stalls")
def test_a_collective_on_the_event_loop(tmp_path: Path) -> None:
    """A warning names it and the line, once, while the loop stands."""
    os.mkfifo(gate := tmp_path / "gate")
    (program := tmp_path / "program.py").write_text(PROGRAM)
    environment = address() | {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    line = [sys.executable, str(program), str(gate)]
    with (
        started(line, **environment, RANK="0") as first,
        started(line, **environment, RANK="1") as second,
    ):
        assert first.stderr is not None
        told = first.stderr.readline()
        gate.write_text("go on")
        found = [each.communicate(timeout=PATIENCE) for each in (first, second)]
    what = rf"torch.distributed.all_reduce \({program}:7\)"
    found_seconds = re.match(rf"the event loop of 'worker0' has stood for (\d+) s in {what}", told)
    assert found_seconds, told
    assert int(found_seconds[1]) <= 10
    assert "await asyncio.to_thread(...)" in told
    assert found == [("", ""), ("", "")]
    assert [first.returncode, second.returncode] == [0, 0]
