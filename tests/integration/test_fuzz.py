"""Malformed frames and results between processes."""

import asyncio
import math

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import RpcError, call, remote
from aiorpc_torch.testing import world
from tests.support import actors, raw_connections
from tests.support.malformed import (
    BYTES,
    LIES,
    NONSENSE,
    dump,
)

CALLS, SLOT, CONTROL, RESULTS = 1, 2, 3, 4  # kinds of frames, of which a peer may send any


@pytest.mark.promise("security.frames")
async def test_a_peer_that_sends_junk() -> None:
    """The victim serves on, and nothing of it stays."""
    frames = [(CALLS, each) for each in (*BYTES.values(), *map(dump, LIES.values()))]
    frames += [(kind, data) for kind in (SLOT, CONTROL, RESULTS) for data in BYTES.values()]
    async with world(["evil", "victim"]):
        counter = await aiorpc.create("victim", actors.Counter, 0)
        for to in ("victim", "main"):
            sending = asyncio.create_task(call("evil", raw_connections.send_junk, to, frames))
            for number in range(200):
                assert await remote(counter).add(1) == number + 1
            assert await sending == len(frames)
            assert await remote(counter).add(-200) == 0
        assert await call("victim", raw_connections.sessions) == ["main"]
        assert (await call("victim", aiorpc.observe.stats)).running == 1, "that very call"


@pytest.mark.promise("security.frames")
async def test_a_peer_that_answers_junk() -> None:
    """Its callers get errors, whatever it says; all else goes on."""
    async with world(["evil", "good"]):
        for junk in [each for each in NONSENSE.values() if isinstance(each, bytes)]:
            await call("evil", raw_connections.answer_junk, junk)
            with pytest.raises(RpcError):
                await call("evil", math.hypot, 3, 4)
            assert await call("good", math.hypot, 3, 4) == 5
        assert await call("evil", math.hypot, 3, 4) == 5, "it is honest again"
