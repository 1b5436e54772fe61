"""Small tensors as bytes: a few µs. In a table of torch's, they cost about 100 µs a message."""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.compat import dispatch_keys
from .._torch.sendable import (
    COMPRESSED,
    PLAIN_KEYS,
    check_tensor,
    has_memory,
    is_plain,
    last_element,
)

INLINE_BYTES = 128 * 1024
"""Maximum bytes of a tensor, of a call's arguments or of a result that travel on the connection.
Larger ones travel in shared memory or by torch RPC (`python -m benchmarks.threshold`).
At 32 KiB a connection took a quarter to a half of the time of shared memory, at 1 MiB nine times as
long, alone and with 64 calls in flight."""

SHARED_BUFFER_BYTES = 4096  # maximum bytes of a column whose tensors share one buffer

TENSOR_CELL = "tensor"
"""Kind of a cell that is a tensor, outside the bytes."""

TensorKind = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Dtype, shape and strides of the tensors of one column; without strides if they are contiguous."""


_copy = ctypes.pythonapi["PyBytes_FromStringAndSize"]  # as ctypes.string_at, without its wrapper
_copy.restype, _copy.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)

TYPED_BYTES = 1024
"""Maximum bytes of a tensor that is copied by a type of its size: in a third of the instructions,
but CPython keeps each type for ever."""


class _TypesOfSizes(dict[int, Callable[[int], Any]]):
    """For a number of bytes: makes an object of the memory at an address, whose `raw` copies it."""

    def __missing__(self, size: int) -> Callable[[int], Any]:
        self[size] = made = (ctypes.c_char * size).from_address
        return made


_at_address = _TypesOfSizes()


def small_tensor(tensor: Tensor) -> tuple[TensorKind, bytes] | None:
    """Return kind and elements of a small, plain, dense CPU tensor outside autograd.

    Return None for any other tensor. The bytes are no view of the memory: on Python 3.12 a
    transport keeps views that it cannot write at once, and a change after its `write` arrived at
    the peer.
    """
    if dispatch_keys(tensor).raw_repr() not in PLAIN_KEYS or tensor.requires_grad:
        return None
    size = tensor.nbytes
    if size > INLINE_BYTES:
        return None
    if not size:  # or an overflow of it
        return None if tensor.numel() else ((tensor.dtype, tensor.shape, ()), b"")
    strides: tuple[int, ...] = ()
    if not tensor.is_contiguous():
        if not has_memory(tensor, size):
            return None
        tensor = tensor.clone()  # without gaps; the strides keep their order, as of large tensors
        if not tensor.is_contiguous():
            strides = tensor.stride()
    # As `has_memory`, without the parts that are known here.
    address, end = tensor.data_ptr(), size
    if offset := tensor.storage_offset():
        end += int(offset) * tensor.itemsize
    if not address or end > tensor.untyped_storage().nbytes():
        return None
    # Not numpy(): it has no bfloat16 and may not be installed.
    data = _at_address[size](address).raw if size <= TYPED_BYTES else _copy(address, size)
    return (tensor.dtype, tensor.shape, strides), data


def tensor_cell(tensor: Tensor) -> tuple[TensorKind | str, Any] | None:
    """Return the kind and the cell of a tensor, None if it is packed with its call.

    Raises:
        ValueError: if the tensor cannot be sent.
    """
    if (found := small_tensor(tensor)) is not None:
        return found
    if tensor.is_cuda or tensor.layout in COMPRESSED:
        return None  # only a PickledValue has a fence
    return TENSOR_CELL, compact_at_call(tensor)


def from_bytes(kind: Any, data: bytes, count: int) -> list[Tensor]:
    """Return the `count` tensors of a `TensorKind` whose bytes were joined.

    Raises:
        ValueError: if the number of bytes is wrong, or the kind is not one of tensors.
    """
    size = _bytes_of_one(kind)
    dtype, shape, strides = kind
    if len(data) != count * size:
        raise ValueError(f"{len(data)} bytes are not {count} tensors of {dtype} {shape}")
    if not size:
        return [_empty(shape, dtype) for _ in range(count)]
    buffer = bytearray(data)
    flat = [torch.frombuffer(buffer, dtype=dtype)] if count == 1 else _rows(buffer, dtype, count)
    if strides:
        return [row.as_strided(shape, strides) for row in flat]
    # By its keyword: else torch first takes the shape for a dtype, and makes an exception.
    return flat if len(shape) == 1 else [row.view(size=shape) for row in flat]


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without elements."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError:  # dense strides would overflow; those of an expanded tensor do not
        return torch.empty_strided(shape, [0] * len(shape), dtype=dtype)


@functools.lru_cache(maxsize=1024)
def _bytes_of_one(kind: TensorKind | str) -> int:
    """Return the bytes of one tensor of a kind. Raises ValueError if it is none of tensors."""
    if isinstance(kind, str):
        raise ValueError(f"bytes in a column of kind {kind}")
    dtype, shape, strides = kind
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"bytes are not tensors of {dtype}")
    count = math.prod(shape)
    if strides and not _are_inside(shape, strides, count):
        raise ValueError(f"strides {strides} lead out of a tensor of shape {shape}")
    return count * dtype.itemsize


def _are_inside(shape: Sequence[int], strides: Sequence[int], count: int) -> bool:
    """Return whether strides lead to `count` elements at most."""
    if len(shape) != len(strides) or min(shape) <= 0:
        return False
    # The stride of an axis of one element leads nowhere, but torch takes no larger number.
    are_valid = min(strides) >= 0 and max(strides) < 1 << 63
    return are_valid and last_element(shape, strides) <= count


def _rows(buffer: bytearray, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Return `count` tensors of one length."""
    # Not unbind(): its rows are views. Autograd forbids to change them in place, and saving one row
    # would save the whole column.
    size = len(buffer) // count
    starts = range(0, len(buffer), size)
    if len(buffer) <= SHARED_BUFFER_BYTES:
        length = size // dtype.itemsize
        return [torch.frombuffer(buffer, dtype=dtype, count=length, offset=at) for at in starts]
    # Separate buffers: one kept tensor must not keep the memory of all.
    return [torch.frombuffer(buffer[at : at + size], dtype=dtype) for at in starts]


DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    # A quantised tensor is more than its bytes. Creating one from bytes sometimes ends the process
    # (seen with torch 2.15, tests/loopback/test_fuzz.py).
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""The dtype of each name in messages: quantised ones have none."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The name of each dtype in messages; none for quantised ones."""


def wire_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype that `small_tensor` takes."""
    return DTYPE_NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name in messages.

    Raises:
        ValueError: if there is none.
    """
    if (found := DTYPES.get(name)) is None:
        raise ValueError(f"unknown dtype: {name!r}")
    return found


def compact_storage(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it if its storage is larger than the tensor.

    torch sends the whole storage of a view, unless it is more than twice the view. So a row would
    be sent with its whole batch.
    """
    if tensor.layout is not torch.strided:
        return tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def is_contiguous_part(tensor: Tensor) -> bool:
    """Return whether one run of bytes in a larger storage is all of a plain CPU tensor.

    A tensor that requires a gradient is none: its copy belongs to the autograd graph.
    """
    if not is_plain(tensor) or tensor.requires_grad:
        return False
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() > tensor.nbytes


def compact_at_call(tensor: Tensor) -> Tensor:
    """Return the tensor as a call holds it, copied now if it cannot be cut out when it is sent.

    Any other part is not copied here: that would be a second copy, on the event loop.

    Raises:
        ValueError: if the tensor cannot be sent.
    """
    check_tensor(tensor)
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor  # the common case
    return tensor if is_contiguous_part(tensor) else compact_storage(tensor)


def size_of(tensor: Tensor) -> int:
    """Return the bytes of the tensor to send."""
    # A sparse tensor does not know its bytes; assume that they are many.
    if tensor.layout is not torch.strided:
        return 1 << 20
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())  # an expanded one has few
