"""The use of the CUDA devices of this process, read by NVML: a process without CUDA starts none."""

import importlib.util

import torch


def gpu_use() -> dict[int, float]:
    """Return for each device with tensors of this process its share of time with a kernel, 0 to 1.

    Kernels of other processes count too. It is over the driver's last sample, of up to a second.
    Empty without CUDA, or without `nvidia-ml-py`.
    """
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not is_used or importlib.util.find_spec("pynvml") is None:
        return {}
    devices = range(torch.cuda.device_count())
    try:
        return {
            each: torch.cuda.utilization(each) / 100
            for each in devices
            if torch.cuda.memory_reserved(each)
        }
    except Exception:  # of NVML: no driver in this container, a MIG device, ...
        return {}
