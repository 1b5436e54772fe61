"""Tensors as bytes: which may ride in a message itself, and how many of one shape become a column.

A tensor in torch's table costs about 100 µs a message, whatever its size; as bytes, a few. Large
ones stay in the table, where they are not copied. Knows tensors, and nothing of messages.
"""

import ctypes
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .._torch.compat import dispatch_keys

INLINE_BYTES = 128 * 1024
"""Bytes up to which a tensor, an argument list or a result travels on the connection. What is
larger travels by torch RPC (`python -m benchmarks.threshold`)."""

SHARED = 4096  # bytes up to which the tensors of a column share one buffer

Kind = tuple[torch.dtype, tuple[int, ...]]
"""What tensors of one column have in common: dtype and shape."""


_copy = ctypes.string_at


def _plain_keys() -> frozenset[int]:
    with torch.inference_mode():
        inference = torch.empty(0)
    return frozenset(dispatch_keys(tensor).raw_repr() for tensor in (torch.empty(0), inference))


_PLAIN = _plain_keys()


def small_bytes(tensor: Tensor) -> bytes | None:
    """A copy of the elements, in order, of a tensor for which its bytes may stand: small, plain,
    dense, on the CPU, outside autograd. None of any other.
    """
    # Its dispatch keys say at once that it is not sparse, quantised, conjugated, negated, wrapped
    # or elsewhere. is_conj() and is_neg() give up the GIL, which costs 20 µs in a busy process.
    if dispatch_keys(tensor).raw_repr() not in _PLAIN or tensor.requires_grad:
        return None
    size = tensor.nbytes
    if size > INLINE_BYTES:
        return None
    # Not numpy(), which knows no bfloat16 and may not be installed.
    dense = tensor if tensor.is_contiguous() else tensor.contiguous()
    return _copy(dense.data_ptr(), size) if size else b""


def from_bytes(kind: Kind, data: bytes, count: int) -> list[Tensor]:
    """The `count` tensors whose bytes were joined: each with a storage of its own extent.

    Raises:
        ValueError: if there are more or fewer bytes than they have.
    """
    dtype, shape = kind
    length = math.prod(shape)
    if dtype not in _NAMES or len(data) != count * length * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not {count} tensors of {dtype} {shape}")
    if count == 1 and len(shape) == 1 and length:  # mostly
        return [torch.frombuffer(bytearray(data), dtype=dtype)]
    if not length:
        return [torch.empty(shape, dtype=dtype) for _ in range(count)]
    # Not unbind(): its rows are views, which autograd forbids to change in place, and each would
    # take the whole column along wherever it is saved.
    buffer, size = bytearray(data), len(data) // count
    if len(data) <= SHARED:
        flat = [
            torch.frombuffer(buffer, dtype=dtype, count=length, offset=offset)
            for offset in range(0, count * size, size)
        ]
    else:  # or one that is kept would keep the memory of all
        starts = range(0, count * size, size)
        flat = [torch.frombuffer(buffer[at : at + size], dtype=dtype) for at in starts]
    return flat if len(shape) == 1 else [row.reshape(shape) for row in flat]


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    # Quantised tensors are not their bytes alone; to make one of bytes ends the process, now and
    # then (seen on 2.15, tests/test_fuzz.py).
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_kind(kind: Kind) -> tuple[str, tuple[int, ...]]:
    """A kind in plain words: quicker to pickle, and to read, than torch's own objects."""
    return _NAMES[kind[0]], tuple(kind[1])


def read_kind(words: tuple[str, tuple[int, ...]]) -> Kind:
    """What `write_kind` wrote."""
    return _DTYPES[words[0]], words[1]


class Table(list[Tensor]):
    """The tensors of a message that stay outside its bytes.

    torch sends a storage once for a message, and who unpacks it twice gets it twice. So calls, or
    results, that were given one tensor get copies of it: what one does with it is not the other's.
    """

    _storages: frozenset[int] = frozenset()

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Those of one call, or of one result."""
        own = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
            if storage in self._storages:
                # In a context of distributed autograd the copy is a part of the graph.
                copy = tensor.clone()
                needs = tensor.requires_grad and not copy.requires_grad
                self.append(copy.requires_grad_() if needs else copy)
                continue
            self.append(tensor)
            if storage is not None:
                own.add(storage)
        self._storages |= own


def compact(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it would drag a larger storage along."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def size_of(tensor: Tensor) -> int:
    """Bytes that it takes to send."""
    # A sparse tensor does not know its own; what it may have is large.
    return tensor.nbytes if tensor.layout is torch.strided else 1 << 20
