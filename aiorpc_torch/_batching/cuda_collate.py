"""A CUDA device for a batch: in by one copy for each column, out by one for each tensor.

On a stream of its own, beside what else the device does, and through pinned memory, so that the
thread that queues the copies does not wait for them. Knows tensors, and no batches.
(tests/gpu/test_stage.py)
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .collate import mapped


class Stage:
    """On `device`. Whoever computes there enters it, in whichever thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return f"<Stage on {self.device}>"

    def mark(self) -> torch.cuda.Event:
        """After all that this thread has queued on its own stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    @contextlib.contextmanager
    def entered(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """What is queued inside is on the stage's stream, behind that event."""
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor of many, on the device. Inside."""
        first = tensors[0]
        if first.requires_grad:
            return self.put(torch.stack([*tensors]))
        if first.device.type == "cpu":
            # torch keeps a cache of pinned memory, and gives out no piece of it that a copy reads.
            pinned = torch.empty((len(tensors), *first.shape), dtype=first.dtype, pin_memory=True)
            return self.put(torch.stack([*tensors], out=pinned))
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self.put(torch.stack([*tensors]))

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor on the device. Inside."""
        if tensor.device.type == "cpu" and not tensor.requires_grad:
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def fetch(self, result: Any) -> tuple[Any, torch.cuda.Event]:
        """The nest with its tensors on the CPU, as they are once the event has come. Inside."""
        fetched = mapped(_to_pinned, result)
        # Who waits for it sleeps.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream.record_event(done)
        return fetched, done


def _to_pinned(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    if tensor.requires_grad:  # the copy is a part of its graph
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
