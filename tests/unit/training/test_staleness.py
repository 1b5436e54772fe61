"""Tickets of coroutines: each comes back once, whatever ends its holder."""

import asyncio

import pytest
from hypothesis import given, settings, strategies as st

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout
from aiorpc_torch.training import StalenessLimit, Ticket


async def steps(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Rollout:
    """A task that holds a ticket until it is told to end."""

    def __init__(self, limit: StalenessLimit) -> None:
        self.ticket: Ticket | None = None
        self.ended = asyncio.Event()
        self.task = asyncio.create_task(self._run(limit))

    async def _run(self, limit: StalenessLimit) -> None:
        async with limit.ticket() as self.ticket:
            await self.ended.wait()


@pytest.mark.promise("training.tickets")
async def test_rollouts_wait_in_their_order() -> None:
    limit = StalenessLimit(0, 1)
    rollouts = [Rollout(limit) for _ in range(3)]
    await steps()
    assert [each.ticket is not None for each in rollouts] == [True, False, False]
    rollouts[1].task.cancel()
    rollouts[0].ended.set()
    await steps()
    assert rollouts[2].ticket is not None
    assert limit.in_flight == 1
    rollouts[2].task.cancel()
    await steps()
    assert limit.in_flight == 0
    assert repr(limit) == "<StalenessLimit at version 0, 0 in flight, 0 waiting>"


@pytest.mark.promise("training.staleness")
async def test_a_version_waits_for_rollouts_that_are_too_old() -> None:
    limit = StalenessLimit(1, 8)
    old = Rollout(limit)
    await steps()
    assert await limit.advance(1) == 1
    waiting = asyncio.create_task(limit.advance(2))
    await steps()
    fresh = Rollout(limit)
    await steps()
    assert not waiting.done()
    assert fresh.ticket is not None
    assert fresh.ticket.version == 1
    old.ended.set()
    assert await waiting == 2
    assert limit.staleness == 1
    blocked = asyncio.create_task(limit.advance(4))
    await steps()
    late = Rollout(limit)
    await steps()
    assert late.ticket is None  # it would keep version 4 back
    blocked.cancel()
    await steps()
    assert late.ticket is not None
    assert limit.version == 2
    for each in (fresh, late):
        each.ended.set()
        await each.task


@pytest.mark.promise("training.deadlines")
async def test_deadlines() -> None:
    limit = StalenessLimit(0, 1)
    async with limit.ticket():
        with aiorpc.timeout(0.01):
            with pytest.raises(CallTimeout, match=r"the wait for a ticket timed out.*1 in flight"):
                async with limit.ticket():
                    pass
            with pytest.raises(CallTimeout, match="rollouts that are too old for version 1"):
                await limit.advance(1)
    for version in (None, "1", -1):
        with pytest.raises(ValueError, match="version must be a number from 0 on, got"):
            await limit.advance(version)  # type: ignore[arg-type]
    assert await limit.advance(1) == 1
    assert limit.in_flight == 0


@pytest.mark.promise("training.tickets", "training.staleness")
@settings(max_examples=50)
@given(st.data())
def test_any_order_of_ends_and_cancellations(data: st.DataObject) -> None:
    asyncio.run(_run(data))


async def _run(data: st.DataObject) -> None:
    limit, rollouts, version = StalenessLimit(1, 2), list[Rollout](), 0
    announcing = list[asyncio.Task[int]]()
    for _ in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["start", "end", "cancel", "advance", "stop", "step"]))
        if kind == "start":
            rollouts.append(Rollout(limit))
        elif kind == "advance":
            version += data.draw(st.integers(1, 2))
            announcing.append(asyncio.create_task(limit.advance(version)))
        elif kind == "step":
            await asyncio.sleep(0)
        elif kind == "stop" and announcing:
            data.draw(st.sampled_from(announcing)).cancel()
        elif rollouts and kind in ("end", "cancel"):
            chosen = data.draw(st.sampled_from(rollouts))
            chosen.ended.set() if kind == "end" else chosen.task.cancel()
        assert limit.in_flight <= 2
        assert limit.staleness <= 1
    for each in rollouts:
        each.ended.set()
    await asyncio.wait_for(
        asyncio.gather(*(each.task for each in rollouts), *announcing, return_exceptions=True), 30
    )
    assert limit.in_flight == 0
    done = [each.result() for each in announcing if not each.cancelled()]
    assert limit.version == max(done, default=0)
