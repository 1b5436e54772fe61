"""Tensors of a message in shared memory: what is written, and how a receiver finds it.

A `Block` is memory that is written and freed as a whole: that of the tensors which one receiver
gets, or of those which many receivers get. A receiver's tensors lie in the block; nothing is copied
for them. (tests/unit/protocol/test_shared_tensors.py)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.compat import dispatch_keys
from .tensors import INLINE_BYTES, dtype_named, is_plain, name_of_dtype

ALIGNMENT = 64
"""Bytes to which the tensors of a block are aligned."""

_MARK = "_aiorpc_block"  # attribute of a tensor whose block many messages share


class Place(NamedTuple):
    """The place of a tensor in a message.

    Attributes:
        block: Index of its block; -1 for a tensor without elements.
        start: First byte of its storage in the block.
        size: Bytes of its storage.
        dtype: Name of its dtype.
        offset: Elements of the storage before its first one.
        shape: Its shape.
        strides: Its strides.
        requires_grad: True if it requires a gradient.
    """

    block: int
    start: int
    size: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool


class Source(NamedTuple):
    """A storage to write: its position in the block, and its memory."""

    start: int
    storage: torch.UntypedStorage


class Block:
    """Storages that are written into one segment.

    Args:
        is_shared: True if many receivers map the block.

    Attributes:
        size: Bytes of the block.
        sources: What is to be written, empty once it is.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.size = 0
        self.sources: list[Source] = []
        self.lease: Any = None  # the segment, set by its owner
        self._starts: dict[int, int] = {}  # by address of the storage's object

    def __repr__(self) -> str:
        return f"<Block {self.size:,} bytes{', shared' if self.is_shared else ''}>"

    def add(self, storage: torch.UntypedStorage) -> int:
        """Add a storage, unless it is there; return its first byte."""
        key = storage._cdata
        if key not in self._starts:
            self._starts[key] = self.size
            self.sources.append(Source(self.size, storage))
            self.size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        return self._starts[key]

    def write(self, copy: Callable[[int, int, int], None]) -> None:
        """Call `copy` with position, address and size of each storage. In any thread."""
        for start, storage in self.sources:
            copy(start, storage.data_ptr(), storage.nbytes())


def can_share(tensor: Tensor) -> bool:
    """Return whether the bytes of a tensor's storage are all of it: dense, on the CPU."""
    return is_plain(dispatch_keys(tensor).raw_repr()) and name_of_dtype(tensor.dtype) is not None


def share(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors for many messages, of which the first writes them for all.

    The result holds other objects than `tensors`: what is sent later is not taken for it.
    """
    if sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided) <= INLINE_BYTES:
        return [*tensors]
    block = Block(is_shared=True)
    return [_marked(tensor, block) for tensor in tensors]


def _marked(tensor: Tensor, block: Block) -> Tensor:
    if tensor.requires_grad or not can_share(tensor):
        return tensor
    alias = tensor.detach()
    setattr(alias, _MARK, block)
    block.add(alias.untyped_storage())
    return alias


def place(tensors: Iterable[Tensor]) -> tuple[list[Block], list[Place]] | None:
    """Return the blocks and the places of a message's tensors, None if torch has to send them."""
    own, blocks, places = Block(), list[Block](), list[Place]()
    for tensor in tensors:
        if not can_share(tensor):
            return None
        block = getattr(tensor, _MARK, own)
        storage = tensor.untyped_storage()
        index, start, size = -1, 0, 0
        if tensor.numel():
            if block not in blocks:
                blocks.append(block)
            index, start, size = blocks.index(block), block.add(storage), storage.nbytes()
            if not storage.data_ptr() or not _fits(tensor, size):  # it was freed or resized
                return None
        name = name_of_dtype(tensor.dtype)
        assert name is not None
        shape, strides = tuple(tensor.shape), tensor.stride()
        offset, needs = int(tensor.storage_offset()), tensor.requires_grad
        places.append(Place(index, start, size, name, offset, shape, strides, needs))
    return blocks, places


def _fits(tensor: Tensor, size: int) -> bool:
    end = _end(int(tensor.storage_offset()), tensor.shape, tensor.stride())
    return end <= size // tensor.itemsize


def _end(offset: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the elements of a storage up to the last one of a tensor that has elements."""
    return 1 + offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def read_places(places: Iterable[Any], sizes: Sequence[int]) -> list[Place]:
    """Return checked places of a received message.

    Args:
        places: The fields of each place.
        sizes: Bytes of each block's segment.

    Raises:
        TypeError, ValueError: if a place is malformed, or exceeds its segment.
    """
    found = [Place(*fields) for fields in places]
    for each in found:
        _check(each, sizes)
    return found


_TYPES = (int, int, int, str, int, tuple, tuple, bool)


def _check(each: Place, sizes: Sequence[int]) -> None:
    if tuple(map(type, each)) != _TYPES:
        raise TypeError(f"malformed place of a tensor: {each}")
    numbers = (each.start, each.size, each.offset, *each.shape, *each.strides)
    if {*map(type, numbers)} != {int} or min(numbers) < 0 or len(each.shape) != len(each.strides):
        raise ValueError(f"malformed place of a tensor: {each}")
    dtype = dtype_named(each.dtype)
    if not (elements := math.prod(each.shape)):
        return
    if not 0 <= each.block < len(sizes) or each.start + each.size > sizes[each.block]:
        raise ValueError(f"a tensor exceeds its segment: {each}")
    end = _end(each.offset, each.shape, each.strides)
    if end * dtype.itemsize > each.size or elements >= 1 << 40:
        raise ValueError(f"a tensor exceeds its storage: {each}")


def tensors_at(places: Iterable[Place], buffers: Sequence[Any]) -> list[Tensor]:
    """Return the tensors at checked places; `buffers` are the memory of the blocks."""
    storages: dict[tuple[int, int], torch.UntypedStorage] = {}
    found = []
    for each in places:
        dtype = dtype_named(each.dtype)
        if math.prod(each.shape):
            key = each.block, each.start
            if key not in storages:
                flat = torch.frombuffer(
                    buffers[each.block], dtype=torch.uint8, count=each.size, offset=each.start
                )
                storages[key] = flat.untyped_storage()
            tensor = torch.empty(0, dtype=dtype).set_(
                storages[key], each.offset, each.shape, each.strides
            )
        else:
            tensor = torch.empty_strided(each.shape, each.strides, dtype=dtype)
        found.append(tensor.requires_grad_() if each.requires_grad else tensor)
    return found
