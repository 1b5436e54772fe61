"""Device maps of all workers, resolved together: each error names worker, peer and device."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from aiorpc_torch._directory.registration import Registration
from aiorpc_torch._torch.devices import DeviceRoutes, normalize_device_maps
from aiorpc_torch._world.startup import resolve_device_maps


def registration(name: str, devices: int, maps: Any) -> Registration:
    return Registration(name, 0, 2, "1", devices=devices, device_maps=normalize_device_maps(maps))


def error_of(*registrations: Registration, entering: str = "") -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        resolve_device_maps(registrations, entering)
    return str(raised.value)


@pytest.mark.promise("devices.maps")
def test_errors_name_worker_peer_and_device() -> None:
    """Every worker raises the error, so its text names the worker, the peer and the device."""
    a, b = registration("a", 2, {}), registration("b", 1, {})
    assert resolve_device_maps([a, b]) == [{}, {}]
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


def test_auto_is_resolved_once_for_all_first_workers() -> None:
    """Those with as many devices share their maps: the maps of N workers are not N squared."""
    found = resolve_device_maps([registration(f"w{rank}", 2, "auto") for rank in range(9)])
    assert all(each is found[0] for each in found)
    assert len(found[0]) == 9


def test_maps_of_workers_that_join() -> None:
    """They have maps for those before them, which have none for them; own mistakes are errors."""
    first = registration("a", 2, "auto")
    second, third = (
        replace(registration(name, 2, "auto"), rank=rank, joined=True)
        for name, rank in (("b", 1), ("c", 2))
    )
    maps = resolve_device_maps([first, second, third], "c")
    assert [sorted(each) for each in maps] == [["a"], ["a", "b"], ["a", "b", "c"]]
    gone = replace(second, device_maps={"x": {"cuda:0": "cuda:0"}})
    assert resolve_device_maps([first, gone], "")[1] == gone.device_maps, "x has left"
    with pytest.raises(ValueError, match="'x', which is not a worker"):
        resolve_device_maps([first, gone], "b")


@pytest.mark.promise("devices.joiners")
def test_maps_for_a_worker_that_joins_later(caplog: pytest.LogCaptureFixture) -> None:
    """A first worker names it; the log tells that there is none yet, in case the name is wrong.

    It is the worker that joins that fails if the map is not one to its devices.
    """
    first = registration("a", 2, {"c": {"cuda:1": "cuda:0"}})
    second, third = (
        replace(registration(name, devices, {}), rank=rank, joined=True)
        for rank, (name, devices) in enumerate([("b", 0), ("c", 1)], 1)
    )
    assert resolve_device_maps([first], "a") == [{"c": {"cuda:1": "cuda:0"}}]
    assert "device map for 'c', which is not a worker of this world: a. It" in caplog.text
    maps = dict(zip("abc", resolve_device_maps([first, second, third], "c"), strict=True))
    routes = [DeviceRoutes.for_worker(each, maps) for each in "abc"]
    near, far = torch.device("cuda", 1), torch.device("cuda", 0)
    assert routes[0].calls == {"c": {near: far}}
    assert routes[2].answers["a"] == {far: near}
    assert "cuda" not in str(routes[1])
    assert error_of(first, replace(third, devices=0), entering="c") == (
        "worker 'a' maps its cuda:1 to cuda:0 of 'c', but 'c' has no CUDA devices"
    )
    assert error_of(replace(first, devices=1)) == (
        "worker 'a' maps its cuda:1 to cuda:0 of 'c', but 'a' has 1 CUDA device"
    )


# ── routes ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("devices.auto")
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


def test_the_work_is_linear_in_workers_without_devices_that_have_joined() -> None:
    """Each worker that enters resolves the maps of all."""

    class Counted(list[Registration]):
        looks = 0

        def __iter__(self) -> Iterator[Registration]:
            for each in super().__iter__():
                self.looks += 1
                yield each

    many = (registration(f"w{rank}", 0, "auto") for rank in range(100))
    joined = Counted(replace(each, rank=rank, joined=rank > 0) for rank, each in enumerate(many))
    assert resolve_device_maps(joined, "w1") == [{}] * 100
    assert joined.looks < 1000
