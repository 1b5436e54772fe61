"""Remote generators of another process."""

import asyncio

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import NotInWorld, WorkerLeft, call, remote
from aiorpc_torch.testing import world
from aiorpc_torch.types import RemoteTraceback
from tests.support import actors
from tests.support.actors import Streams, TwoArguments
from tests.support.consumers import (
    ENDLESS,
    MEGABYTE,
    by_break,
    by_cancelling_the_task,
    by_dropping_it,
    closed,
    iterate,
    streams,
    take,
)

# ── how they are closed ─────────────────────────────────────────────────────────────────────────


async def test_streams_from_another_process() -> None:
    """Streams work the same between two processes."""
    async with world(["b"], transports=["uv"]):
        rref = await streams("b")
        for kind in ("count", "count_in_thread"):
            method = getattr(remote(rref), kind)
            assert [item async for item in method(500)] == list(range(500))
        for kind in ("count", "count_in_thread"):
            method = getattr(remote(rref), kind)
            large = [item async for item in method(8, size=MEGABYTE)]
            assert all(torch.equal(t, torch.full((MEGABYTE,), n)) for n, t in enumerate(large))
        assert [item async for item in call("b", actors.count_in_thread, 3)] == [0, 1, 2]
        assert [item async for item in call(rref, Streams.count, 3)] == [0, 1, 2]

        failing = aiter(remote(rref).fail_at(2, TwoArguments, 7, "there"))
        assert await take(failing, 2) == [0, 1]
        with pytest.raises(TwoArguments) as raised:
            await anext(failing)
        assert isinstance(raised.value.__cause__, RemoteTraceback)
        assert raised.value.__cause__.worker == "b"

        for kind in ("count", "count_in_thread"):
            for way in (by_break, by_cancelling_the_task, by_dropping_it):
                fresh = await streams("b")
                await way(getattr(remote(fresh), kind)(ENDLESS))
                await closed(fresh)

        before = aiorpc.observe.stats()
        numbers = [iterate(call("b", actors.count, 200)) for _ in range(20)]
        assert await asyncio.gather(*numbers) == [list(range(200))] * 20
        assert aiorpc.observe.stats().messages - before.messages < 800, "for 4000 items"

        left = asyncio.create_task(iterate(remote(rref).follow()))
        await remote(rref).followed()
    with pytest.raises((NotInWorld, WorkerLeft)):  # the two leave together
        await left
