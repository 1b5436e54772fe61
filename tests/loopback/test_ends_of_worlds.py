"""Ends of a world of one, in order or by an exception, with calls to itself pending."""

import asyncio
import logging

import pytest

from aiorpc_torch import NotServing, create, remote
from aiorpc_torch._torch.agent import is_running
from aiorpc_torch.testing import Gate, world


@pytest.mark.parametrize("fails", [False, True])
async def test_torch_stops_though_a_call_to_itself_is_pending(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Time after time: the caller learns that the world is over, and torch's threads have ended."""
    for _ in range(10):
        try:
            async with world():
                gate = await create("main", Gate)
                waiting = asyncio.create_task(remote(gate).passed())
                await remote(gate).entered()
                if fails:
                    raise LookupError
        except LookupError:
            pass
        assert not is_running()
        with pytest.raises(NotServing):
            await waiting
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR], caplog.text
