"""Deadlines as they travel: what is left of a caller's time bounds what others do for it."""

import asyncio
from typing import Any

import anyio

from aiorpc_torch import call, create, remote
from aiorpc_torch.testing import Gate, world
from tests.support import actors
from tests.support.actors import Streams

LATE = 1.0  # seconds of a deadline before which workers have begun what it ends


async def hold_when_entered(gate: Any) -> None:
    await remote(gate).entered()
    await actors.hold_loop(1.5 * LATE)


async def test_scopes_between_processes() -> None:
    """Clocks differ, seconds left do not: a scope here bounds b, and c behind it."""
    async with world(["b", "c"], transports=["uv"]):
        with anyio.fail_after(1000.0):
            lefts = await call("b", actors.remaining_along, "c", "main")
        assert lefts == sorted(lefts, reverse=True)
        assert all(900.0 < left < 1000.0 for left in lefts)
        assert await call("b", actors.remaining_along, "c") == [None, None]

        gate, streams = await create("c", Gate), await create("c", Streams)
        with anyio.move_on_after(LATE) as scope:
            async with asyncio.TaskGroup() as group:
                group.create_task(call("b", actors.call_on, gate, "passed"))
                group.create_task(call("b", actors.iterate_on, streams, "follow"))
        assert scope.cancelled_caught
        async with asyncio.timeout(30.0):
            assert await remote(gate).cancelled() == 1
            assert await remote(streams).closed() == 1

        # b gives up at the same moment, and its CallTimeout is here when a loop that was held
        # comes to look: the scope ends as silently as ever.
        gate = await create("c", Gate)
        held = asyncio.create_task(hold_when_entered(gate))
        with anyio.move_on_after(LATE) as scope:
            await call("b", actors.call_on, gate, "passed")
        assert scope.cancelled_caught
        await held
