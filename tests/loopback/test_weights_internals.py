"""How often weights are copied for followers that wait."""

import asyncio
from collections.abc import Callable

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import register
from aiorpc_torch._shm import segment_store
from aiorpc_torch.training import Weights
from tests.support.followers import Net

from .test_weights import Following, following, until

__all__ = ["following"]


@pytest.mark.promise("training.once")
async def test_followers_that_wait_share_one_copy(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, real = list[Callable[[], None]](), segment_store.memory_threads

    def count(copy: Callable[[], None]) -> None:
        copies.append(copy)
        real(copy)

    monkeypatch.setattr(segment_store, "memory_threads", count)
    weights = Weights(Net(0, size=512).state_dict())
    register("policy", weights)
    policies = [await following() for _ in range(3)]
    await weights.publish(Net(1, size=512).state_dict())
    await asyncio.gather(*(policy.wait(1) for policy in policies))
    copies.clear()
    await until(lambda: aiorpc.observe.stats().in_flight == 3)
    await weights.publish(Net(2, size=512).state_dict())
    await asyncio.gather(*(policy.wait(2) for policy in policies))
    assert len(copies) == 1
    assert all(policy.state["layers.3.bias"].sum() == 1024 for policy in policies)
