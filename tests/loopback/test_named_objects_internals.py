"""The log line of a lookup that waits."""

import asyncio

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch._client import named_members
from tests.support.group_members import Node

pytestmark = pytest.mark.usefixtures("world")


async def test_a_lookup_tells_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: nobody knows whether the worker that was to register the object is alive."""
    monkeypatch.setattr(named_members, "LOG_DELAY", 0.0)
    looking = asyncio.create_task(aiorpc.lookup("late", on="main"))
    while not caplog.records:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    aiorpc.register("late", Node(1))
    await looking
    [record] = caplog.records
    text = "the lookup of 'late' waits until worker 'main' registers it"
    assert (record.levelname, record.getMessage()) == ("WARNING", text)
