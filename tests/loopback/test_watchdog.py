"""The timer of the watchdog: when it is renewed, and for how long."""

import asyncio
import faulthandler
import time
from typing import Any

import pytest

from aiorpc_torch.testing import world


async def test_a_loop_may_stand_for_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also right before a renewal; and the process ends an eighth of the time later at most."""
    armed: list[tuple[float, float]] = []
    enough = asyncio.Event()

    def arm(seconds: float, **_: Any) -> None:
        armed.append((time.monotonic(), seconds))
        if len(armed) == 3:
            enough.set()

    monkeypatch.setattr(faulthandler, "dump_traceback_later", arm)
    async with world(watchdog=1.0):
        await enough.wait()
    assert {seconds for _, seconds in armed} == {1.125}
    assert armed[1][0] - armed[0][0] >= 0.124  # a clock of ms may be early
