"""The relays of hosts: one for each, and another once it is reported lost."""

import asyncio
import weakref
from typing import Any

import pytest
import torch

from aiorpc_torch.training import Weights, relays
from aiorpc_torch.training.relays import Relay, own_host
from aiorpc_torch.training.snapshots import Taking, Version


def test_processes_of_one_host_have_one_name() -> None:
    assert own_host() == own_host()


async def test_the_publishers_own_host_needs_no_relay() -> None:
    worker, _ = await Weights(torch.ones(1)).source(own_host(), "a")
    assert worker is None


async def test_the_first_follower_of_a_host_is_its_relay_until_it_is_lost() -> None:
    weights = Weights(torch.ones(1))

    async def relay_for(host: str, worker: str, lost: str | None = None) -> str | None:
        return (await weights.source(host, worker, lost))[0]

    assert await relay_for("x", "a") == "a"
    assert await relay_for("x", "b") == "a"
    assert await relay_for("y", "c") == "c"
    assert await relay_for("x", "b", "a") == "b"
    assert await relay_for("x", "d", "a") == "b"  # reported late
    assert await relay_for("x", "d", "b") == "d"


class Publisher:
    """Sends the version after the one that was seen, and no version after 7."""

    async def after(self, seen: int, _has: object, _wanted: object) -> Version:
        if seen == 7:
            await asyncio.Event().wait()
        return Taking(torch.ones(1)).take().sent(seen + 1, ())


async def test_who_waits_keeps_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay drops the version before the one that comes: it is large."""
    monkeypatch.setattr(relays, "remote", lambda found: found)
    publisher: Any = Publisher()
    relay = Relay("relay", publisher)
    await relay._answer("after", 4, (), {})
    version = weakref.ref(relay._held[5][0])
    waiting = asyncio.create_task(relay._answer("after", 7, (), {}))
    await relay._answer("after", 5, (), {})
    assert [*relay._held] == [6]
    assert version() is None
    waiting.cancel()
    await asyncio.wait((waiting,))
    relay._stop_idling()
