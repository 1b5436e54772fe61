"""The order of CUDA work for tensors that change threads, and the tensors that torch can send.

A launched kernel is only queued, on the current stream of its thread. A thread that uses the
result on another stream must queue behind the kernel, and tell the allocator that it does. The host
never waits. (tests/gpu/test_stream_order.py, tests/unit/torch/test_cuda.py)
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .devices import refuse_sparse
from .sendable import clone
from .tree import tensors_in

# ── fences ──────────────────────────────────────────────────────────────────────────────────────


class StreamFence:
    """Events behind the work that this thread has queued for some CUDA tensors."""

    __slots__ = ("_events", "_tensors", "devices")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._events = {
            device: torch.cuda.current_stream(device).record_event()
            for device in {tensor.device for tensor in tensors}
        }
        self.devices = self._events.keys()

    def is_done(self, until: float) -> bool:
        """Return whether the work is done; the host waits until a `time.perf_counter()` at most."""
        events = [*self._events.values()]
        while not all(event.query() for event in events):
            if time.perf_counter() >= until:
                return False
        return True

    def wait(self) -> None:
        """Let this thread's current streams wait for the work, and use the tensors."""
        streams = {device: torch.cuda.current_stream(device) for device in self._events}
        for device, event in self._events.items():
            streams[device].wait_event(event)
        record_streams(self._tensors, streams.values())


def record_streams(tensors: Iterable[Tensor], streams: Iterable[torch.cuda.Stream]) -> None:
    """Tell the allocator that the streams use those of the CUDA tensors that are on their device.

    The memory is then not used again before the work that is queued there by the time of its end.
    """
    by_device = [(stream.device, stream) for stream in streams]
    for tensor in tensors:
        for device, stream in by_device:
            # Sparse tensors have no record_stream.
            if tensor.device == device and tensor.layout is torch.strided:
                tensor.record_stream(stream)


def fence_tensors(tensors: Iterable[Tensor]) -> StreamFence | None:
    """Record events for the CUDA tensors; None if there are none."""
    found = [tensor for tensor in tensors if tensor.is_cuda]
    return StreamFence(found) if found else None


def fence_tree(value: object) -> StreamFence | None:
    """Record events for the CUDA tensors in a tree; None if there are none."""
    return fence_tensors(tensors_in(value))


# ── coroutines on streams of their own ──────────────────────────────────────────────────────────

_open_streams: list[torch.cuda.Stream] = []
"""Streams on which coroutines run that wait now, in all event loops of this process."""


@contextlib.contextmanager
def stream_of_coroutine(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let the results that a coroutine awaits in the block be used on its stream.

    Each step of the coroutine has to wait for the event loop's stream, which has the results.
    """
    _open_streams.append(stream)
    try:
        yield
    finally:
        _open_streams.remove(stream)


def note_delivered(value: object) -> None:
    """Note a value that arrived on the event loop's stream: coroutines may use it on theirs.

    The allocator is told at the arrival, since a check at each `await` would cost every call.
    """
    if _open_streams:
        found = [tensor for tensor in tensors_in(value) if tensor.is_cuda]
        record_streams(found, {*_open_streams})


# ── tensors that torch can send ─────────────────────────────────────────────────────────────────


def sendable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of a message in forms that torch sends correctly from devices.

    TensorPipe ends the process for a CUDA tensor without memory (tensorpipe#447), so one without
    elements becomes a view of one element. torch sends each storage once, and assigns devices to
    storages by the index of the tensor. So with several devices, a second tensor of one storage is
    copied.

    Raises:
        ValueError: if one is sparse, and one is on a device.
    """
    devices = {tensor.device for tensor in tensors}
    if all(device.type == "cpu" for device in devices):
        return [*tensors]
    refuse_sparse(tensors)
    found, storages = [], set[int]()
    for tensor in tensors:
        if tensor.device.type != "cpu" and not tensor.numel():
            sent = _with_memory(tensor)
        elif len(devices) > 1 and tensor.untyped_storage()._cdata in storages:
            sent = copy_of(tensor)
        else:
            sent = tensor
        found.append(sent)
        storages.add(sent.untyped_storage()._cdata)
    return found


def _with_memory(tensor: Tensor) -> Tensor:
    with torch.enable_grad():
        one_more = torch.cat((tensor.flatten(), tensor.new_zeros(1)))
        return _requiring_as(tensor, one_more[:0].view(tensor.shape))


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy that requires a gradient if the tensor does; a part of its autograd graph."""
    with torch.enable_grad():  # on the event loop's thread a coroutine may wait in its no_grad()
        return _requiring_as(tensor, clone(tensor))


def _requiring_as(tensor: Tensor, copy: Tensor) -> Tensor:
    needs = tensor.requires_grad and not copy.requires_grad
    return copy.requires_grad_() if needs else copy
