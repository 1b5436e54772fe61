"""Tickets and replay buffers at a distance: holders that are killed, deadlines, comebacks."""

import asyncio
import contextlib
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, RRef, create, lookup, proxy, register, remote
from aiorpc_torch.testing import kill, world
from aiorpc_torch.training import Replay, SampleLimit, StalenessLimit
from tests.support.slack import SLACK

LONG = 60.0


class Worker:
    """Runs rollouts with tickets of worker "main"."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()

    async def roll_out(self, item: Any = None) -> int:
        """Return the version of the ticket, at the end."""
        limit: RRef[StalenessLimit] = await lookup("limit", on="main")
        replay: RRef[Replay] = await lookup("replay", on="main")
        async with proxy(limit).ticket() as ticket:
            await self.ends.wait()
            await proxy(replay).insert(item, ticket)
            return ticket.version

    async def end(self) -> None:
        self.ends.set()


async def until(limit: StalenessLimit, in_flight: int, waiting: int = 0) -> None:
    async with asyncio.timeout(LONG):
        while (limit.in_flight, len(limit._rollouts)) != (in_flight, waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.promise("training.tickets", "training.ratio")
async def test_tickets_of_a_holder_that_is_killed() -> None:
    """They come back; those that it waited for go to others, also to its replacement process."""
    async with world(["a", "b"], max_restarts=1) as me, asyncio.timeout(LONG):
        limit, replay = StalenessLimit(0, 2), Replay(limit=SampleLimit(1, min_size=2, slack=4))
        register("limit", limit)
        register("replay", replay)
        a, b = await create(["a", "b"], Worker)
        lost = [asyncio.create_task(remote(a).roll_out()) for _ in range(3)]
        await until(limit, 2, 1)
        kept = asyncio.create_task(remote(b).roll_out("from b"))
        await until(limit, 2, 2)
        kill("a")
        await asyncio.wait(lost)
        await until(limit, 1)
        advancing = asyncio.create_task(limit.advance(1))
        await remote(b).end()
        assert await kept == 0
        assert await advancing == 1
        await me.wait_for("a")
        again = await create("a", Worker)
        await remote(again).end()
        assert await remote(again).roll_out("from a") == 1
        await until(limit, 0)
        assert set(await replay.sample(4)) <= {"from a", "from b"}
        assert replay.version == 1


@pytest.mark.promise("training.tickets", "training.deadlines")
async def test_tickets_and_inserts_that_are_cancelled_or_late() -> None:
    exports = [Worker, "aiorpc_torch.training"]
    async with world(["a"], exports=exports), asyncio.timeout(LONG):
        limit, replay = StalenessLimit(0, 1), Replay(limit=SampleLimit(1, min_size=1, slack=1))
        register("limit", limit)
        register("replay", replay)
        worker = await create("a", Worker)
        for kind in ("cancelled", "late"):
            holding = asyncio.create_task(remote(worker).roll_out())
            await until(limit, 1)
            with aiorpc.timeout(None if kind == "cancelled" else SLACK / 4):
                waiting = asyncio.create_task(remote(worker).roll_out())
            await until(limit, 1, 1)
            if kind == "cancelled":
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
            else:
                with pytest.raises(CallTimeout):
                    await waiting
            await until(limit, 1)
            holding.cancel()
            await until(limit, 0)
        await remote(worker).end()
        for _ in range(2):
            await remote(worker).roll_out()
        with aiorpc.timeout(0.05), pytest.raises(CallTimeout):
            await remote(worker).roll_out()
        await until(limit, 0)
        assert replay.inserted == 2
