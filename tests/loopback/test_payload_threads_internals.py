"""Threads in which payloads are fenced."""

from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, remote
from aiorpc_torch._server import server as server_module

from .test_payload_threads import LARGE, Unpickled, Where, here


async def test_arguments_are_unpickled_behind_their_transfer(
    world: aiorpc.types.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the loop, whose stream waits first: unpickling may run user code that uses tensors."""

    class Fence:
        def wait(self) -> None:
            Unpickled.noted.append(f"fence: {here()}")

    recorded: list[str] = []

    def fence_tensors(*_: Any) -> Fence:
        recorded.append(here())
        return Fence()

    monkeypatch.setattr(server_module, "fence_tensors", fence_tensors)
    Unpickled.noted.clear()
    await remote(RRef(Where(LARGE))).take(Unpickled())
    assert Unpickled.noted == ["fence: loop", "unpickled: loop", "fence: loop", "called"]
    assert recorded != ["loop"]  # on torch's thread, whose streams the message has
