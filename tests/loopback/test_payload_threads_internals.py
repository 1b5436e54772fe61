"""Threads in which payloads are fenced, and the channels that torch's agent gets."""

from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, remote
from aiorpc_torch._server import server as server_module
from aiorpc_torch._torch import agent as agent_module
from aiorpc_torch.testing import world as new_world

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


async def test_channels_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`channels=` of a world, else the environment's, are its agent's; tensors travel by them."""
    found: list[Any] = []
    make: Any = agent_module.rpc.TensorPipeRpcBackendOptions

    def noted(**options: Any) -> Any:
        if "num_worker_threads" in options:  # not to check a name
            found.append(options["_channels"])
        return make(**options)

    monkeypatch.setattr(agent_module.rpc, "TensorPipeRpcBackendOptions", noted)
    async with new_world(channels=["basic"]):
        assert await remote(RRef(Where(LARGE))).coroutine(LARGE) == ["loop"]
    async with new_world():
        pass
    monkeypatch.setenv("AIORPC_TORCH_CHANNELS", "mpt_uv,basic")
    async with new_world():
        pass
    async with new_world(channels=["basic"]):
        pass
    assert found == [["basic"], None, ["mpt_uv", "basic"], ["basic"]]
