"""Collation on a CUDA device: one copy per parameter to the device, one per tensor back.

The copies run on a stream of their own and through pinned memory, so no thread waits for them.
(tests/gpu/test_cuda_collate.py)
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.tree import map_tensors


class CudaCollator:
    """Stacks on `device`, on a stream of its own. Call its methods inside `on_stream`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return f"<CudaCollator on {self.device}>"

    def record_event(self) -> torch.cuda.Event:
        """Return an event after the work queued on this thread's current stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    @contextlib.contextmanager
    def on_stream(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Queue the work of the block on the collator's stream, behind the event `after`."""
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return one tensor with a new first dimension, on the device."""
        first = tensors[0]
        if first.requires_grad:
            return self.to_device(torch.stack([*tensors]))
        if first.device.type == "cpu":
            # torch caches pinned memory, and reuses no part of it that a copy still reads.
            pinned = torch.empty((len(tensors), *first.shape), dtype=first.dtype, pin_memory=True)
            return self.to_device(torch.stack([*tensors], out=pinned))
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self.to_device(torch.stack([*tensors]))

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device."""
        if tensor.device.type == "cpu" and not tensor.requires_grad:
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def to_host(self, result: Any) -> tuple[Any, torch.cuda.Event]:
        """Return the tree with its tensors on the CPU, and the event after which they are valid."""
        copied = map_tensors(_to_pinned, result)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no busy wait
        self._stream.record_event(done)
        return copied, done


def _to_pinned(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    if tensor.requires_grad:  # autograd has to record the copy
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
