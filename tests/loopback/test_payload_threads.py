"""Where user code runs whose call came by torch RPC: never on torch's threads.

Their current CUDA streams are those of the message. Calls that ran there would be in no order with
other calls of the object, which run on the default streams.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import RRef, autograd, create, remote
from aiorpc_torch.testing import world as new_world

LARGE = torch.ones(1 << 18)  # bytes enough to travel by torch RPC


def here() -> str:
    """The kind of the current thread."""
    if asyncio._get_running_loop() is not None:
        return "loop"
    return threading.current_thread().name.rpartition("-")[0]


class Unpickled:
    """Notes the thread in which it is unpickled, and what was noted before."""

    noted: ClassVar[list[str]] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.noted.append(f"unpickled: {here()}")
        self.__dict__.update(state)

    def __init__(self) -> None:
        self.tensor = LARGE


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function in front of a coroutine."""

    @functools.wraps(function, assigned=())
    def plain(self: Any, tensor: Tensor) -> Any:
        self.found.append(here())
        return function(self, tensor)

    return plain


class Where:
    def __init__(self, tensor: Tensor) -> None:
        self.found = [here()]

    def plain(self, tensor: Tensor) -> list[str]:
        return [*self.found, here()]

    async def coroutine(self, tensor: Tensor) -> list[str]:
        return [here()]

    @decorated
    async def behind(self, tensor: Tensor) -> list[str]:
        return [*self.found[1:], here()]

    def items(self, tensor: Tensor) -> Iterator[str]:
        for _ in range(3):
            yield here()

    async def take(self, given: Unpickled) -> None:
        given.noted.append("called")


async def test_calls_run_on_the_loop_or_in_threads_of_the_worker(
    world: aiorpc.types.Worker,
) -> None:
    """Lone calls, whose payload comes alone, are no exception; nor is one in a context."""
    where = remote(await create("main", Where, LARGE))
    assert await where.plain(LARGE) == ["aiorpc-def", "aiorpc-def"]
    assert await where.coroutine(LARGE) == ["loop"]
    assert await where.behind(LARGE) == ["aiorpc-def", "loop"]
    assert [item async for item in where.items(LARGE)] == ["aiorpc-def"] * 3
    async with autograd.context():
        assert await where.plain(LARGE) == ["aiorpc-def", "aiorpc-def", "aiorpc-def"]


# ── channels ────────────────────────────────────────────────────────────────────────────────────


async def test_channels_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="torch has no channel 'nope'"):
        async with new_world(channels=["nope"]):
            pass
    with pytest.raises(TypeError, match="channels must be a list of names, got 'basic'"):
        async with new_world(channels="basic"):
            pass
    with monkeypatch.context() as patches:
        patches.setenv("AIORPC_TORCH_CHANNELS", "no_such,basic")
        with pytest.raises(RuntimeError, match="Unknown channel: no_such"):
            async with new_world():
                pass
    async with new_world():  # nothing is left of it
        assert await remote(RRef(Where(LARGE))).coroutine(LARGE) == ["loop"]


async def test_channels_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`channels=` of a world, else the environment's, are its agent's; tensors travel by them."""
    found: list[Any] = []
    make: Any = rpc.TensorPipeRpcBackendOptions

    def noted(**options: Any) -> Any:
        if "num_worker_threads" in options:  # not to check a name
            found.append(options["_channels"])
        return make(**options)

    monkeypatch.setattr(rpc, "TensorPipeRpcBackendOptions", noted)
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
