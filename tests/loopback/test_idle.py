"""A worker that waits uses next to no CPU: nothing polls."""

import asyncio
import time

import pytest

from aiorpc_torch import RRef, remote
from aiorpc_torch.testing import Gate
from aiorpc_torch.types import Worker

PERIOD = 1.0  # seconds
MOST = 0.1  # seconds of CPU in that time; one thread that polls takes all of it


@pytest.mark.promise("worlds.idle")
async def test_an_idle_worker_uses_no_cpu(world: Worker) -> None:
    """Neither the event loop nor a thread runs while one call waits on an open connection."""
    gate = Gate()
    waiting = asyncio.ensure_future(remote(RRef(gate)).passed())
    await gate.entered()
    start = time.process_time()
    await asyncio.sleep(PERIOD)
    used = time.process_time() - start
    await gate.open()
    await waiting
    assert used < MOST
