"""Values whose tensors on devices travel as bytes in the pickle.

The pickle of the value, with slots for these tensors, is one of bytes in the pickle that travels.
So the message has no tensors on devices, and goes wherever one with tensors on the CPU does.
(tests/unit/wire/test_staged.py)
"""

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.cuda import note_delivered
from .._torch.devices import DeviceMapping
from .._torch.staging import copies_on_host, on_device
from .buffers import NOTHING, memory_of
from .exceptions import RemoteFailure
from .pickling import PickledAs, PickledValue, pack, unpack
from .tensors import dtype_named, wire_dtype


class OnDevice(NamedTuple):
    """A received value, and those of its tensors that this thread has put on devices.

    A thread with other streams has to wait for the copies.
    """

    value: Any
    tensors: list[Tensor]


def stage(packed: PickledValue, mapped: DeviceMapping) -> PickledValue:
    """Return a sendable value with its tensors on devices as bytes, for devices that are `mapped`.

    It is `packed` itself if it has to travel by torch RPC: its tensors are not small, not all on
    devices, or not ready yet. All receivers of one value get it in the same way.
    """
    if packed.fence is None or packed.outside is not NOTHING:
        return packed
    if packed.on_host is None:
        packed.on_host = copies_on_host(packed.tensors, packed.fence) or ()
    if not packed.on_host:
        return packed
    placed = []
    for tensor, copy in zip(packed.tensors, packed.on_host, strict=True):
        memory = PickleBuffer(memory_of(copy)) if tensor.numel() else b""
        there = str(mapped[tensor.device]), wire_dtype(tensor.dtype)
        form = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        placed.append((memory, *there, *form, tensor.requires_grad))
    staged = pack(PickledAs(read_staged, packed.data, placed))
    staged.rrefs = packed.rrefs
    return staged


def read_staged(data: bytes, placed: Sequence[tuple[Any, ...]]) -> Any:
    """Return the `OnDevice` that was pickled, or a `RemoteFailure` if it cannot be unpickled."""
    tensors = []
    for memory, device, dtype, shape, strides, offset, needs_grad in placed:
        form = dtype_named(dtype), shape, strides, offset
        tensor = on_device(memory, torch.device(device), *form)
        tensors.append(tensor.requires_grad_(needs_grad))
    value = unpack(data, tensors)
    return value if type(value) is RemoteFailure else OnDevice(value, tensors)


def delivered(value: Any) -> Any:
    """Return what the caller gets, in the thread that has unpickled it."""
    if type(value) is not OnDevice:
        return value
    note_delivered(value.tensors)
    return value.value
