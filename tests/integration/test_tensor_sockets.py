"""Tensors on sockets of their own, between processes: one that freezes, and one that dies."""

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import Callable

import pytest
import torch

from aiorpc_torch import CallTimeout, WorkerLost, create, remote
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import Workers, connection
from tests.support.tensor_shelf import TensorShelf

HUGE = 1 << 24  # elements of float32: more than sockets hold
SOON = 30.0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.promise("sockets.lost", "sockets.cancelled")
async def test_a_peer_that_freezes_and_dies(over_sockets: None, workers: Workers) -> None:
    """Calls end in time while a transfer is stuck; the peer's end frees the tensors."""
    await workers(["a"])
    rref = await create("a", TensorShelf)
    x = torch.ones(HUGE)
    assert await remote(rref).keep(x) == 1
    assert stats().socket_messages == 1
    pid = await remote(rref).pid()
    await until(lambda: not connection("a").holds_memory)
    os.kill(pid, signal.SIGSTOP)
    late = asyncio.ensure_future(remote(rref, timeout=0.5).keep(x))
    lost = asyncio.ensure_future(remote(rref).keep(torch.ones(HUGE)))
    await until(lambda: connection("a").holds_memory)
    with pytest.raises(CallTimeout) as caught:
        await late
    assert not caught.value.may_have_run
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(lost, SOON)
    freed = weakref.ref(x.untyped_storage())
    del x, late, lost, caught
    await until(lambda: gc.collect() >= 0 and freed() is None)
