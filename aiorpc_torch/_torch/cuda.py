"""The order of CUDA work for tensors that change threads.

A launched kernel is only queued, on the current stream of its thread. A thread that uses the
result on another stream must queue behind the kernel, and tell the allocator that it does. The host
never waits. (tests/gpu/test_stream_order.py)
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .tree import tensors_in


class StreamFence:
    """Events behind the work that this thread has queued for some CUDA tensors."""

    __slots__ = ("_events", "_tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._events = {
            device: torch.cuda.current_stream(device).record_event()
            for device in {tensor.device for tensor in tensors}
        }

    @property
    def devices(self) -> Iterable[torch.device]:
        """Devices of the tensors."""
        return self._events

    def wait(self) -> None:
        """Let this thread's current streams wait for the work, and use the tensors."""
        streams = {device: torch.cuda.current_stream(device) for device in self._events}
        for device, event in self._events.items():
            streams[device].wait_event(event)
        for tensor in self._tensors:
            if tensor.layout is torch.strided:  # sparse tensors have no record_stream
                tensor.record_stream(streams[tensor.device])


def fence_tensors(tensors: Iterable[Tensor]) -> StreamFence | None:
    """Record events for the CUDA tensors; None if there are none."""
    found = [tensor for tensor in tensors if tensor.is_cuda]
    return StreamFence(found) if found else None


def fence_tree(value: object) -> StreamFence | None:
    """Record events for the CUDA tensors in a tree; None if there are none."""
    return fence_tensors(tensors_in(value))
