"""Devices by any name, and the devices on which tensors may be sent."""

from typing import Any

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


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta", torch.device("cpu")])
def test_only_cuda_devices_with_an_index(device: Any) -> None:
    for maps in ({"ps": {device: "cuda:0"}}, {"ps": {"cuda:0": device}}):
        with pytest.raises(ValueError, match=f"with its index, as 'cuda:0', got '{device}'"):
            normalize_device_maps(maps)


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
