"""Device maps: valid and invalid ones, errors at the start, and devices that may be sent."""

import multiprocessing
from typing import Any

import pytest
import torch
from actors import Counter
from hypothesis import given, strategies as st

import aiorpc_torch as aiorpc
from aiorpc_torch import create, remote
from aiorpc_torch._torch.devices import DeviceRoutes, check_sendable, normalize_device_maps
from aiorpc_torch._world.device_maps import resolve_device_maps
from aiorpc_torch._world.registration import Registration
from aiorpc_torch.testing import world


def registration(name: str, devices: int, maps: Any) -> Registration:
    return Registration(name, 0, 2, "1", devices=devices, device_maps=normalize_device_maps(maps))


def error_of(*registrations: Registration) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        resolve_device_maps(registrations)
    return str(raised.value)


# ── maps ────────────────────────────────────────────────────────────────────────────────────────


def test_devices_by_any_name() -> None:
    """As torch takes them: a name, an index, a device."""
    maps = {"ps": {0: "cuda:1", "cuda:2": torch.device("cuda:0"), torch.device("cuda", 3): 2}}
    assert normalize_device_maps(maps) == {
        "ps": {"cuda:0": "cuda:1", "cuda:2": "cuda:0", "cuda:3": "cuda:2"}
    }
    assert normalize_device_maps({}) == {}
    assert normalize_device_maps("auto") == "auto"


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta", torch.device("cpu")])
def test_only_cuda_devices_with_an_index(device: Any) -> None:
    for maps in ({"ps": {device: "cuda:0"}}, {"ps": {"cuda:0": device}}):
        with pytest.raises(ValueError, match=f"with its index, as 'cuda:0', got '{device}'"):
            normalize_device_maps(maps)


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


def test_errors_name_worker_peer_and_device() -> None:
    """Every worker raises the error, so its text names the worker, the peer and the device."""
    a, b = registration("a", 2, {}), registration("b", 1, {})
    assert resolve_device_maps([a, b]) == [{}, {}]
    assert error_of(registration("a", 2, {"c": {}}), b) == (
        "worker 'a' has a device map for 'c', which is not a worker of this world: a, b"
    )
    assert error_of(registration("a", 2, {"b": {"cuda:2": "cuda:0"}}), b) == (
        "worker 'a' maps its cuda:2 to cuda:0 of 'b', but 'a' has 2 CUDA devices"
    )
    assert error_of(registration("a", 2, {"b": {"cuda:0": "cuda:1"}}), b) == (
        "worker 'a' maps its cuda:0 to cuda:1 of 'b', but 'b' has 1 CUDA device"
    )
    assert error_of(a, registration("b", 0, {"a": {"cuda:0": "cuda:1"}})) == (
        "worker 'b' maps its cuda:0 to cuda:1 of 'a', but 'b' has no CUDA devices"
    )
    assert error_of(registration("a", 2, {"b": {"cuda:0": "cuda:0", "cuda:1": "cuda:0"}}), b) == (
        "worker 'a' maps its cuda:1 to cuda:0 of 'b', and its cuda:0 too: map each device "
        "to a different one"
    )


# ── routes ──────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=5))
def test_auto_is_the_same_index_on_both_sides(counts: list[tuple[int, bool]]) -> None:
    """As many devices as both have, for every peer and itself; peers without "auto" too."""
    registrations = [
        registration(f"w{rank}", count, "auto" if auto else {})
        for rank, (count, auto) in enumerate(counts)
    ]
    found = dict(
        zip([each.name for each in registrations], resolve_device_maps(registrations), strict=True)
    )
    for (count, auto), one in zip(counts, registrations, strict=True):
        for (others, _), other in zip(counts, registrations, strict=True):
            devices = [f"cuda:{index}" for index in range(min(count, others))] if auto else []
            assert found[one.name].get(other.name, {}) == dict(zip(devices, devices, strict=True))


def test_where_tensors_may_be() -> None:
    """Arguments where the own map begins, results where the caller's ends."""
    maps = {"a": {"b": {"cuda:0": "cuda:1"}}, "b": {}}
    zero, one = torch.device("cuda:0"), torch.device("cuda:1")
    a, b = DeviceRoutes.for_worker("a", maps), DeviceRoutes.for_worker("b", maps)
    assert (a.used, a.calls, a.answers) == ([zero], {"b": {zero}}, {})
    assert (b.used, b.calls, b.answers) == ([one], {}, {"a": {one}})
    check_sendable([zero, torch.device("cpu")], a.calls["b"], "b")
    with pytest.raises(ValueError, match="a tensor on cuda:1 cannot be sent to worker 'b': move"):
        check_sendable([one], a.calls["b"], "b")


# ── in worlds ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.worlds
async def test_auto_without_devices() -> None:
    """Is no map at all."""
    if torch.cuda.device_count():
        pytest.skip("there are devices")
    async with world(["a"], device_maps="auto"):
        assert await remote(await create("a", Counter)).add(2) == 2


@pytest.mark.worlds
async def test_a_map_that_cannot_be_ends_the_start_of_all() -> None:
    """No worker waits for another, and the children have ended."""
    with pytest.raises(ValueError, match=r"worker 'main' maps its cuda:97 to cuda:0 of 'a', but"):
        async with world(["a"], device_maps={"a": {97: 0}}):
            pass
    assert not multiprocessing.active_children()
