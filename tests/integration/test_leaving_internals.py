"""How many requests a wait for the end of a world makes."""

from typing import Any

import pytest

from aiorpc_torch._node.departures import Departures
from aiorpc_torch.testing import world
from tests.support.raw_connections import read


async def test_a_wait_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each worker, at rank 0, which answers all when the last one has left."""
    names, handle = [], Departures.handle

    def count(self: Departures, data: bytes, reply: Any) -> None:
        names.append(read(data)[0])
        handle(self, data, reply)

    monkeypatch.setattr(Departures, "handle", count)
    async with world(["a", "b", "c"]):
        assert names == []
    assert sorted(names) == ["a", "b", "c"]
