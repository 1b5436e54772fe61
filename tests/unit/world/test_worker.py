"""How a worker serves until a peer has left."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from aiorpc_torch import Worker, WorkerLost
from aiorpc_torch._protocol.handshake import Party
from aiorpc_torch._world.departures import Departures


def worker(told: dict[str, str]) -> Worker:
    """Worker a, whose peer b has told this as it left; its detector counts b as alive."""
    detector: Any = SimpleNamespace(lost_peers={}, probe=lambda _: None)
    watching = {"name": "a", "watching_peers": lambda *_: contextlib.nullcontext()}
    pool: Any = SimpleNamespace(**watching, me=Party("a", 0))
    peers: Any = {"b": None}
    numbers = {"a": 0, "b": 1}
    departures = Departures(pool, detector, peers, numbers, lambda: told, detector.probe, "a")
    return Worker("a", 0, 2, ("b",), 0, detector, departures)


async def test_serve_returns_when_the_peer_has_left() -> None:
    """In order."""
    await worker({"b": ""}).serve("b")


async def test_a_peer_that_failed_is_lost() -> None:
    """Also if a late answer to a ping has made it count as alive again."""
    with pytest.raises(WorkerLost, match=r"'b' is lost: its block raised ValueError: x$"):
        await worker({"b": "its block raised ValueError: x\nTraceback"}).serve("b")
