"""Worlds with device maps on a machine without devices."""

import multiprocessing

import pytest
import torch

from aiorpc_torch import create, remote
from aiorpc_torch.testing import world
from tests.support.actors import Counter

# ── in worlds ───────────────────────────────────────────────────────────────────────────────────


async def test_auto_without_devices() -> None:
    """Is no map at all."""
    if torch.cuda.device_count():
        pytest.skip("there are devices")
    async with world(["a"], device_maps="auto"):
        assert await remote(await create("a", Counter)).add(2) == 2


@pytest.mark.promise("devices.maps")
async def test_a_map_that_cannot_be_ends_the_start_of_all() -> None:
    """No worker waits for another, and the children have ended."""
    with pytest.raises(ValueError, match=r"worker 'main' maps its cuda:97 to cuda:0 of 'a', but"):
        async with world(["a"], device_maps={"a": {97: 0}}):
            pass
    assert not multiprocessing.active_children()
