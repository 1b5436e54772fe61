"""Memory for received tensors: used again when it is garbage, bounded, freed when idle."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiorpc_torch._carrier import memory as module
from aiorpc_torch._carrier.memory import ReceiveMemory, receive_memory_of

SIZE = 1 << 20
SOON = 30.0


def address(buffer: Any) -> int:
    return int(torch.frombuffer(buffer, dtype=torch.uint8).data_ptr())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_it_is_used_again_when_it_is_garbage() -> None:
    """And not before, whichever thread frees it."""
    memory = receive_memory_of(asyncio.get_running_loop())
    assert receive_memory_of(asyncio.get_running_loop()) is memory
    first = memory.take(SIZE)
    tensor, where = torch.frombuffer(first, dtype=torch.uint8), address(first)
    del first
    assert address(other := memory.take(SIZE)) != where
    held = [tensor]
    del tensor
    await asyncio.to_thread(held.clear)
    await until(lambda: len(memory.used) == 1)
    assert address(memory.take(SIZE)) == where
    assert address(other) != where


async def test_more_than_its_limit_is_memory_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be written as a whole."""
    monkeypatch.setattr(module, "memory_limit", lambda: 2 * SIZE)
    memory = ReceiveMemory(asyncio.get_running_loop())
    kept = [memory.take(SIZE) for _ in range(5)]
    assert memory.pool.total == 2 * SIZE
    for each in kept:
        torch.frombuffer(each, dtype=torch.uint8, count=SIZE).fill_(1)


async def test_idle_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timer is left."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    memory = ReceiveMemory(asyncio.get_running_loop())
    memory.take(SIZE)
    gc.collect()
    await until(lambda: memory.pool.total == 0)
    assert not len(memory.pool)
    assert not memory._is_trimming


async def test_no_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error tells it, and later there may be some."""

    def full(_: int) -> Any:
        raise OSError(12, "cannot allocate memory")

    memory = ReceiveMemory(asyncio.get_running_loop())
    with monkeypatch.context() as patch:
        patch.setattr(memory.pool, "_make", full)
        with pytest.raises(OSError, match="cannot allocate"):
            memory.take(SIZE)
    assert memory.pool.total == 0
    memory.take(SIZE)
