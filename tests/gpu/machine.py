"""The machine and its device: `python -m tests.gpu.machine` prints facts, or fails and says why.

It runs before anything else. A machine without a device, or with a CPU build of torch, is an error
here, though `pytest tests/gpu` skips its tests there.
"""

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OLDEST = (2, 11)  # of torch


class NoDeviceError(Exception):
    """The tests cannot run here; the text says what is missing."""


def facts() -> Iterator[tuple[str, str]]:
    """Yield names and values, after a first kernel has run.

    Raises:
        NoDeviceError: if there is no device that torch can use.
    """
    yield "Python", f"{platform.python_version()} at {sys.executable}"
    yield "processor", f"{platform.machine()}, kernel {platform.release()}"
    yield "driver", driver()
    torch = torch_with_cuda()
    yield "torch", f"{torch.__version__}, built for CUDA {torch.version.cuda}"
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / (1 << 30)
        yield f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB"
    found = torch.ones(4, device="cuda:0").sum().item()
    if found != 4.0:
        raise NoDeviceError(f"the first kernel computed {found} as the sum of four ones")


def torch_with_cuda() -> Any:
    """Import torch, and check that it can use a device."""
    try:
        import torch
    except ImportError as exc:
        raise NoDeviceError(f"torch cannot be imported by {sys.executable}: {exc}") from None
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise NoDeviceError(f"torch {torch.__version__} is installed, and {least} is the oldest")
    if torch.version.cuda is None:
        raise NoDeviceError(f"torch {torch.__version__} is a build for the CPU: it has no CUDA")
    if not torch.cuda.is_available():
        raise NoDeviceError(f"torch {torch.__version__} finds no CUDA device; driver: {driver()}")
    return torch


def driver() -> str:
    """Return what is known of the driver."""
    line = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(line[0]):
        done = subprocess.run(line, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode == 0:
            return done.stdout.split("\n")[0].strip()
    told = Path("/proc/driver/nvidia/version")
    return told.read_text().split("\n")[0] if told.exists() else "none found"


def main() -> None:
    """Print the facts as they are found."""
    try:
        for name, value in facts():
            print(f"{name}: {value}", flush=True)
    except NoDeviceError as exc:
        sys.exit(f"no device: {exc}")


if __name__ == "__main__":
    main()
