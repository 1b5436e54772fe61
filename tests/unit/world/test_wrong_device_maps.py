"""Device maps that cannot be: an error where the world is entered."""

from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc


@pytest.mark.parametrize(
    ("maps", "why"),
    [({"a": {"cpu": "cuda:0"}}, "with its index"), ("each", 'a map for each peer, or "auto"')],
)
async def test_errors_are_raised_where_the_world_is_entered(maps: Any, why: str) -> None:
    """Before anything starts."""
    with pytest.raises(ValueError, match=why):
        async with aiorpc.local_world(["a"], device_maps=maps):
            pass
    with pytest.raises(ValueError, match=why):
        async with aiorpc.worker(rank=0, world_size=1, device_maps=maps):
            pass


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta", torch.device("cpu")])
async def test_only_cuda_devices_with_an_index(device: Any) -> None:
    for maps in ({"ps": {device: "cuda:0"}}, {"ps": {"cuda:0": device}}):
        with pytest.raises(ValueError, match=f"with its index, as 'cuda:0', got '{device}'"):
            async with aiorpc.local_world(0, device_maps=maps):
                pass
