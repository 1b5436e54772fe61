"""CUDA's order where tensors change threads: what one thread's streams have yet to do for them.

A kernel is only queued when the call that launches it returns, on the stream that is current in its
thread. Another thread that uses what it makes, on a stream of its own, has to queue behind it, and
to tell the allocator that it does. Nobody waits on the host. Knows tensors, and nothing of calls.
(tests/gpu/test_order.py)
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .compat import tree_leaves


class Fence:
    """Behind the work that makes some tensors, in the thread that made this."""

    __slots__ = ("_events", "_tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._events = {
            device: torch.cuda.current_stream(device).record_event()
            for device in {tensor.device for tensor in tensors}
        }

    @property
    def devices(self) -> Iterable[torch.device]:
        """On which the tensors are."""
        return self._events

    def wait(self) -> None:
        """What this thread queues from now on comes after that work, and may use the tensors."""
        streams = {device: torch.cuda.current_stream(device) for device in self._events}
        for device, event in self._events.items():
            streams[device].wait_event(event)
        for tensor in self._tensors:
            if tensor.layout is torch.strided:  # torch has no such thing for sparse ones
                tensor.record_stream(streams[tensor.device])


_SCALARS = frozenset((bool, int, float, complex, str, bytes, type(None)))


def fence(tensors: Iterable[Tensor]) -> Fence | None:
    """Behind the work that makes those of the tensors that are on CUDA; None if none is."""
    found = [tensor for tensor in tensors if tensor.is_cuda]
    return Fence(found) if found else None


def fence_of(value: object) -> Fence | None:
    """The same of the tensors that are anywhere in lists, tuples and dicts."""
    # A tree is slow to walk: over a microsecond for each number in it.
    if isinstance(value, Tensor):
        return fence((value,))
    if type(value) is list and _SCALARS.issuperset(map(type, value)):
        return None
    return fence(each for each in tree_leaves(value) if isinstance(each, Tensor))
