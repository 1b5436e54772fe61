"""A call that may have run is never sent again, whatever happens to its connection."""

import asyncio
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from aiorpc_torch import RRef, WorkerLost, remote
from aiorpc_torch.testing import drop_connection
from aiorpc_torch.types import Worker

SOON = 30.0  # seconds


class Runs:
    """Calls that count their starts."""

    def __init__(self) -> None:
        self.started: Counter[int] = Counter()

    async def run(self, number: int, waits: bool) -> int:
        self.started[number] += 1
        if waits:
            await asyncio.Event().wait()
        return number


@pytest.mark.promise("lost.once")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(waits=st.lists(st.booleans(), min_size=1, max_size=8), turns=st.integers(0, 6))
async def test_calls_of_an_aborted_connection(world: Worker, waits: list[bool], turns: int) -> None:
    """Each runs at most once; each ends with its result or `WorkerLost`."""
    runs = Runs()
    rref = RRef(runs)
    assert await remote(rref).run(-1, False) == -1  # the connection is open
    calls = [
        asyncio.ensure_future(remote(rref).run(number, each)) for number, each in enumerate(waits)
    ]
    for _ in range(turns):
        await asyncio.sleep(0)
    drop_connection(world.name)
    async with asyncio.timeout(SOON):
        await asyncio.wait(calls)
        for number, each in enumerate(calls):
            assert isinstance(each.exception(), WorkerLost) or each.result() == number
        assert await remote(rref).run(len(calls), False) == len(calls)
    assert set(runs.started.values()) == {1}
