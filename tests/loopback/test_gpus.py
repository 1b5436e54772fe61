"""The use of CUDA devices, without one: those of this process alone are read."""

import importlib.util
import re
import urllib.request

import pytest
import torch

from aiorpc_torch import observe


@pytest.fixture(autouse=True)
def three_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {0: 40, 1: 90}
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(device != 1))
    monkeypatch.setattr(torch.cuda, "utilization", found.__getitem__)


def gpu_use() -> dict[int, float]:
    """Return the use of each device, as the metrics have it."""
    with observe.serve_metrics() as server:
        with urllib.request.urlopen(server.url, timeout=30.0) as answer:
            text = answer.read().decode()
    found = re.findall(r'^aiorpc_gpu_utilization_ratio{device="(\d+)"} (\S+)$', text, re.M)
    return {int(device): float(share) for device, share in found}


def test_devices_with_tensors_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpu_use() == {0: 0.4}


def test_a_device_that_nvml_does_not_know_costs_nothing() -> None:
    assert gpu_use() == {}  # a KeyError, for device 2


def test_cuda_is_not_initialized_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert gpu_use() == {}


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert gpu_use() == {}
