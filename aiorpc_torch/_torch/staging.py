"""Small tensors on devices as bytes in the memory of the host, and back.

In a message of torch RPC such a tensor costs a call about a millisecond more. (docs/cuda.md;
tests/unit/torch/test_staging.py, tests/gpu/test_staging.py)
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .compat import dispatch_keys
from .cuda import StreamFence, fence_tensors
from .sendable import key_bits

STAGED_BYTES = 256 * 1024
"""Maximum bytes of a message's tensors on devices that travel through the host. There and back on
an H200, 256 KiB took 1.0 ms so and 2.1 ms by torch RPC, 1 KiB 0.6 and 2.4 ms, 4 MiB 4.0 and 2.2."""

STAGED_TENSORS = 16
"""Maximum number of these tensors: each takes a copy of some 10 µs at both ends."""

PATIENCE = 200e-6
"""Seconds that the host waits at most until the tensors of a message are computed, and then until
they are copied. 256 KiB take 42 µs on a device of one process. With 60 µs an echo of 1 KiB between
two processes that share a device took 1.6 ms, by hand through the host 0.6 to 0.7. So most copies
probably took longer than that there. This number was not measured. (H200; docs/cuda.md)
"""

PAUSE = 2e-3
"""Seconds after a wait in vain in which there is none for that device. A hundred calls made
together while a long kernel runs would each hold up the event loop."""


_DENSE = key_bits("CUDA", "AutogradCUDA", "AutocastCUDA", "ADInplaceOrView")
"""Dispatch keys of tensors on a device whose storage's bytes are all of it, as bits."""

_pauses: dict[torch.device, float] = {}
"""The end of the pause of each device, in `time.perf_counter()`. Threads may miss one: a wait."""


# ── to the host ─────────────────────────────────────────────────────────────────────────────────


def copies_on_host(tensors: Sequence[Tensor], fence: StreamFence) -> list[Tensor] | None:
    """Return the bytes of each tensor's storage, None if the tensors have to travel by torch RPC.

    No storage is larger than its tensor. The `fence` is behind the work that computes them.
    """
    start = time.perf_counter()
    if not _are_small(tensors) or any(start < _pauses.get(each, 0.0) for each in fence.devices):
        return None
    if any(map(_is_capturing, fence.devices)):  # a query would end the capture of the graph
        return None
    if fence.is_done(start + PATIENCE):
        copies = [_start_copy(tensor) for tensor in tensors]
        copied = fence_tensors(tensors)
        # Not `Tensor.cpu`, which waits for whatever other threads have queued meanwhile.
        # Since now: the first allocation of pinned memory takes long.
        if copied is None or copied.is_done(time.perf_counter() + PATIENCE):
            return copies
    # torch keeps pinned memory that a copy still writes.
    _pauses.update(dict.fromkeys(fence.devices, time.perf_counter() + PAUSE))
    return None


def _are_small(tensors: Sequence[Tensor]) -> bool:
    """Return whether all are dense ones on devices, few and small, and share no memory."""
    if len(tensors) > STAGED_TENSORS:
        return False
    if any(dispatch_keys(tensor).raw_repr() & ~_DENSE for tensor in tensors):
        return False
    storages = [tensor.untyped_storage() for tensor in tensors]
    # Those that share memory share it at the receiver, too, if torch sends them.
    is_shared = len({storage._cdata for storage in storages}) < len(storages)
    return not is_shared and sum(storage.nbytes() for storage in storages) <= STAGED_BYTES


def _is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _start_copy(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    there = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return _new_pinned(there.numel()).copy_(there, non_blocking=True)


def _new_pinned(size: int) -> Tensor:
    # torch caches pinned memory. Into any other memory a copy blocks the host.
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


# ── to the device ───────────────────────────────────────────────────────────────────────────────


def on_device(
    memory: Any,
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
) -> Tensor:
    """Return a tensor on a device whose storage has the bytes of `memory`.

    It is copied on the current stream of this thread. The host does not wait for that.
    """
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device=device)
    # Pinned: behind other work of the stream, a copy of other memory may block the host.
    there = _pinned(torch.frombuffer(memory, dtype=torch.uint8)).to(device, non_blocking=True)
    found = torch.empty(0, dtype=dtype, device=device)
    return found.set_(there.untyped_storage(), offset, shape, strides)


def _pinned(host: Tensor) -> Tensor:
    return host.pin_memory()
