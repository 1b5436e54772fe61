"""Collation on a CUDA device: one copy per parameter to the device, one per tensor back.

The copies run on a stream of their own and through pinned memory, so no thread waits for them.
(tests/gpu/test_cuda_collate.py)
"""

import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._aio.tasks import StepContext
from .._torch.cuda import record_streams, stream_of_coroutine
from .._torch.tree import map_tensors
from .collate import Collator

R = TypeVar("R")

STREAM_PRIORITY = -1
"""Not 0, the priority of the 32 streams from which torch RPC takes those of its transfers: they
would queue behind a batch."""


class CudaCollator(Collator):
    """Collates on `device`, on a stream of its own. Call its methods inside `on_stream`."""

    def __init__(self, device: torch.device, *, concat: bool = False) -> None:
        super().__init__(device, concat=concat)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            device, priority=STREAM_PRIORITY
        )
        self.device: torch.device = self._stream.device  # with its index

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

    @contextlib.contextmanager
    def _behind_this_thread(self) -> Iterator[None]:
        """Queue the work of the block on the collator's stream, behind this thread's stream.

        Results of remote calls arrive on the latter.
        """
        with self.on_stream(self.record_event()):
            yield

    async def run_coroutine(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Await `coroutine`; run each step of it on the collator's stream."""
        with stream_of_coroutine(self._stream):
            return await StepContext(self._behind_this_thread, coroutine)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        first = tensors[0]
        if first.device.type == "cpu" and not first.requires_grad:
            rows = sum(map(len, tensors)) if self._concat else len(tensors)
            shape = rows, *first.shape[self._concat :]
            # torch caches pinned memory, and reuses no part of it that a copy still reads.
            pinned = torch.empty(shape, dtype=first.dtype, pin_memory=True)
            return self.to_device(self._joined([*tensors], out=pinned))
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        record_streams(tensors, [torch.cuda.current_stream(each) for each in devices])
        return self.to_device(self._joined([*tensors]))

    def to_device(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.requires_grad:
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def to_host(self, result: Any) -> tuple[Any, torch.cuda.Event]:
        """Return the tree with its tensors on the CPU, and the event after which they are valid."""
        copied = map_tensors(self._to_pinned, result)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no busy wait
        self._stream.record_event(done)
        return copied, done

    def _to_pinned(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        # Autograd has to record the copy. The copy of another GPU's tensor is on a stream of that
        # GPU, which the event does not cover.
        if tensor.requires_grad or tensor.device != self.device:
            return tensor.cpu()
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)
