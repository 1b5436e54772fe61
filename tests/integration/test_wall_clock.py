"""Worlds whose wall clocks jump."""

import asyncio
import time

import pytest

from aiorpc_torch import CallTimeout, call, create, local_world, remote
from aiorpc_torch.testing import Gate
from tests.support import clock_jumps

HEARTBEAT = 1.0
SOON = 30.0


@pytest.mark.slow
@pytest.mark.promise("worlds.clock")
async def test_the_wall_clock_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an hour, forward and back: no call ends early or late, and no worker is lost, which would
    end the block."""
    monkeypatch.setattr(time, "time", clock_jumps.jumping)
    async with local_world(["a"], heartbeat=HEARTBEAT, initializer=clock_jumps.jump):
        first, second = await call("a", clock_jumps.offsets)
        assert abs(second - first) > clock_jumps.HOUR
        gate = await create("a", Gate)
        waiting = asyncio.ensure_future(remote(gate, timeout=600.0).passed())
        await remote(gate).entered(1)
        async with asyncio.timeout(SOON):
            with pytest.raises(CallTimeout):
                await remote(gate, timeout=3 * HEARTBEAT).passed()
        assert not waiting.done()
        await remote(gate).open()
        await waiting
