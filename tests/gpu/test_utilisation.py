"""The use of a CUDA device, by NVML."""

import time

import pytest
import torch

from aiorpc_torch._inspection.counters import gpu_use
from tests.support.cuda_actors import needs_device

pytestmark = pytest.mark.gpu


@needs_device
def test_a_busy_device() -> None:
    pytest.importorskip("pynvml")
    a = torch.randn(4096, 4096, device="cuda:0")
    end = time.monotonic() + 20.0
    while (use := gpu_use()).get(0, 0.0) < 0.5 and time.monotonic() < end:
        for _ in range(50):
            a = (a @ a).clamp_(-1.0, 1.0)
        torch.cuda.synchronize()
    assert 0.5 <= use[0] <= 1.0
