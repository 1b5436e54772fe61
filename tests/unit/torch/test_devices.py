"""Devices by any name, and the devices on which tensors may be sent."""

import pytest
import torch

from aiorpc_torch._torch.devices import DeviceRoutes, check_sendable, normalize_device_maps

# ── maps ────────────────────────────────────────────────────────────────────────────────────────


def test_devices_by_any_name() -> None:
    """As torch takes them: a name, an index, a device."""
    maps = {"ps": {0: "cuda:1", "cuda:2": torch.device("cuda:0"), torch.device("cuda", 3): 2}}
    assert normalize_device_maps(maps) == {
        "ps": {"cuda:0": "cuda:1", "cuda:2": "cuda:0", "cuda:3": "cuda:2"}
    }
    assert normalize_device_maps({}) == {}
    assert normalize_device_maps("auto") == "auto"


def test_where_tensors_may_be() -> None:
    """Arguments where the own map begins, results where the caller's ends."""
    maps = {"a": {"b": {"cuda:0": "cuda:1"}}, "b": {}}
    zero, one = torch.device("cuda:0"), torch.device("cuda:1")
    a, b = DeviceRoutes.for_worker("a", maps), DeviceRoutes.for_worker("b", maps)
    assert (a.used, a.calls, a.answers) == ([zero], {"b": {zero: one}}, {})
    assert (b.used, b.calls, b.answers) == ([one], {}, {"a": {one: zero}})


def test_calls_of_own_objects_have_a_reverse_map() -> None:
    """As torch's own start gives the agent: results go back to the device of the arguments."""
    maps = {"a": {"a": {"cuda:0": "cuda:1"}}}
    zero, one = torch.device("cuda:0"), torch.device("cuda:1")
    routes = DeviceRoutes.for_worker("a", maps)
    assert (routes.used, routes.answers) == ([zero, one], {"a": {one: zero}})


META = torch.device("meta")


def test_tensors_that_torch_would_not_send() -> None:
    """A tensor is refused for its device, and a sparse one beside any tensor on a device."""
    plain, far = torch.ones(2), torch.ones(2, device=META)
    check_sendable([plain, far], {META}, "b")
    with pytest.raises(ValueError, match="a tensor on meta cannot be sent to worker 'b': move"):
        check_sendable([plain, far], (), "b")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_sparse_tensors_are_refused_beside_tensors_on_a_device(device: str) -> None:
    sparse = torch.empty(3, 3, layout=torch.sparse_coo, device=device)
    other = torch.ones(2, device=META)
    text = f"sparse_coo on {device} cannot be sent in one call"
    with pytest.raises(ValueError, match=text):
        check_sendable([other, sparse], {META}, "b")
    check_sendable([torch.eye(3).to_sparse(), torch.ones(2)], (), "b")
