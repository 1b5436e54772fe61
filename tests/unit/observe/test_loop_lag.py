"""The lag of an event loop, measured from a thread."""

import asyncio
import threading
import time

import pytest

from aiorpc_torch.observe import metrics
from aiorpc_torch.observe.metrics import LagThread

SOON = 30.0  # seconds


async def test_a_blocked_loop_is_seen_while_it_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for some time afterwards."""
    monkeypatch.setattr(metrics, "INTERVAL", 0.01)
    lag = LagThread(asyncio.get_running_loop())
    lag.start()
    try:
        end = time.monotonic() + SOON
        while lag.longest() < 0.2:
            time.sleep(0.05)  # noqa: ASYNC251 - the loop is blocked
            assert time.monotonic() < end
        async with asyncio.timeout(SOON):
            while len(lag._lag._lags) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert lag.longest() >= 0.2
    finally:
        lag.close()


def test_a_loop_that_has_ended() -> None:
    """The thread ends; there is no lag."""
    loop = asyncio.new_event_loop()
    loop.close()
    lag = LagThread(loop)
    lag.start()
    lag._thread.join(30.0)
    assert lag.longest() == 0.0
    lag.close()
    assert not any(each.name == "aiorpc-loop-lag" for each in threading.enumerate())
