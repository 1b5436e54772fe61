"""The relays of hosts: one for each, and another once it is reported lost."""

import torch

from aiorpc_torch.training import Weights
from aiorpc_torch.training.relays import own_host


def test_processes_of_one_host_have_one_name() -> None:
    assert own_host() == own_host()


async def test_the_publishers_own_host_needs_no_relay() -> None:
    worker, _ = await Weights(torch.ones(1)).source(own_host(), "a")
    assert worker is None


async def test_the_first_follower_of_a_host_is_its_relay_until_it_is_lost() -> None:
    weights = Weights(torch.ones(1))

    async def relay_for(host: str, worker: str, lost: str | None = None) -> str | None:
        return (await weights.source(host, worker, lost))[0]

    assert await relay_for("x", "a") == "a"
    assert await relay_for("x", "b") == "a"
    assert await relay_for("y", "c") == "c"
    assert await relay_for("x", "b", "a") == "b"
    assert await relay_for("x", "d", "a") == "b"  # reported late
    assert await relay_for("x", "d", "b") == "d"
