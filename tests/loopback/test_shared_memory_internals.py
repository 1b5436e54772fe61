"""Tensors in shared memory: what lies in their segments, and frames that are malformed."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiorpc_torch import RRef, autograd, remote
from aiorpc_torch._carrier import memory, shared_memory
from aiorpc_torch._carrier.shared_memory import SegmentStore
from aiorpc_torch._client import connection, pool
from aiorpc_torch._wire.blocks import Block
from aiorpc_torch.observe import stats
from tests.support.raw_connections import server
from tests.support.segment_files import mapped_segments

from .test_shared_memory import HUGE, LARGE, SOON, Shelf, copies, is_given_back, shelf, until

__all__ = ["copies", "shelf"]


def own_connection() -> connection.Connection:
    """The connection of this loop to its own worker."""
    return pool.current().connection("main")


def own_session() -> Any:
    """The other end of it."""
    return server().sessions[own_connection().key]


@pytest.mark.promise("shared.values")
async def test_small_results_after_one_that_torch_carried(shelf: Shelf) -> None:
    """Torch carries the next call of that method, too; its small result ends that."""
    shelf.kept += [torch.eye(LARGE // 100).to_sparse(), 1, 2]
    proxy, transfers = remote(RRef(shelf)), own_connection().transfers
    async with asyncio.timeout(SOON):
        assert (await proxy.get(0)).is_sparse
        assert transfers.large_results
        async with autograd.context():  # whose replies may be bytes alone
            assert await proxy.echo(3) == 3
        assert [await proxy.get(1), await proxy.get(2)] == [1, 2]
    assert not transfers.large_results


@pytest.mark.promise("shared.bounds")
async def test_free_segments_are_closed(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle for long enough, at both ends; no timer is left."""
    monkeypatch.setattr(memory, "IDLE_SECONDS", 0.01)
    gc.collect()
    before = mapped_segments()
    await remote(RRef(shelf)).echo(torch.rand(HUGE))
    await until(lambda: stats().segments == 0)
    await until(lambda: mapped_segments() <= before)
    (store,) = shared_memory._stores.values()
    assert not store.memory._is_trimming


@pytest.mark.promise("shared.cancelled")
async def test_a_payload_behind_another_that_is_cancelled(
    shelf: Shelf, copies: list[Callable[[], None]]
) -> None:
    """Its tensors are copied; its turn to be sent has not come."""
    proxy = remote(RRef(shelf))
    first = asyncio.ensure_future(proxy.keep(torch.ones(HUGE)))
    await until(lambda: len(copies) == 1)
    second = asyncio.ensure_future(proxy.keep(torch.ones(LARGE)))
    await until(lambda: bool(own_connection().state._copies.held()))
    second.cancel()
    await asyncio.wait((second,))
    copies.pop()()
    assert await first == 1
    assert await proxy.keep(2) == 2
    shelf.kept.clear()
    await until(is_given_back)
    assert len(own_connection().state.window) == stats().in_flight == 0


async def test_a_worker_that_leaves_waits_for_its_results(
    shelf: Shelf, copies: list[Callable[[], None]]
) -> None:
    """Until they are copied and the caller has mapped them: its descriptors end with it."""
    call = asyncio.ensure_future(remote(RRef(shelf)).echo([torch.ones(HUGE)]))
    await until(lambda: bool(copies))
    assert not own_session().calls
    copies.pop()()
    await until(lambda: bool(copies))
    assert not own_session().calls
    assert own_session().has_work()
    copies.pop()()
    (found,) = await call
    await until(lambda: not own_session().has_work())
    assert float(found.sum()) == HUGE


async def test_nothing_is_offered_over_tcp(shelf: Shelf) -> None:
    """The peer may be on another host."""
    link = own_connection().carriers.shared
    own_connection().is_local = False
    link._store = None
    link.offer()
    assert link._store is None


def test_a_store_is_closed_with_its_last_link() -> None:
    """What is released after that is ignored."""

    class Link:
        def forget(self, number: int) -> None:
            raise AssertionError

    async def main() -> None:
        loop, link = asyncio.get_running_loop(), Link()
        store = shared_memory.store_of(loop)
        assert shared_memory.store_of(loop) is store
        assert isinstance(store, SegmentStore)
        store.attach(link)
        block = Block()
        block.add(torch.ones(100))
        copy = store.copy(block, lambda: True)
        assert copy is not None
        assert shared_memory.segment_counts()[0] == 1
        store.detach(link)
        del block, copy
        await asyncio.sleep(0)
        assert len(store.memory.pool) == store.memory.pool.total == 0
        assert shared_memory.store_of(loop) is not store
        shared_memory._stores.clear()

    asyncio.run(main())
