"""Tensors of a message as bytes in memory: what is written, and how a receiver finds it.

A `Block` is memory that is written and freed as a whole: that of the tensors which one receiver
gets, or of those which many receivers get. A receiver's tensors lie in the block; nothing is copied
for them. (tests/unit/wire/test_blocks.py)
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.sendable import has_memory, is_plain, last_element
from .buffers import ALIGNMENT
from .tensors import (
    DTYPE_NAMES,
    DTYPES,
    INLINE_BYTES,
    compact_storage,
    dtype_named,
    is_contiguous_part,
)

_BLOCK_ATTRIBUTE = "_aiorpc_block"
"""Name of a tensor's attribute that holds its shared `Block`."""


class Place(NamedTuple):
    """The place of a tensor in a message.

    Attributes:
        block: Index of its block; -1 for a tensor without elements.
        start: First byte of its storage, as it arrives, in the block.
        size: Bytes of that storage.
        dtype: Name of its dtype.
        offset: Elements of that storage before its first one.
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


class Extent(NamedTuple):
    """Memory of a tensor that is written: bytes of its storage.

    Attributes:
        start: Their position in the block.
        skip: Bytes of the storage before them.
        size: Their number.
    """

    start: int
    skip: int
    size: int


class Source(NamedTuple):
    """An extent of a storage to write."""

    extent: Extent
    storage: torch.UntypedStorage


class Block:
    """Memory of tensors that is written as a whole.

    Args:
        is_shared: True if many receivers map the block.

    Attributes:
        size: Bytes of the block.
        sources: What is to be written, empty once it is.
        contents: The same by addresses and torch's count of the changes of each storage. Blocks
            with equal contents have equal bytes.
        copy: Its copy in a segment, set by the carrier.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.size = 0
        self.sources: list[Source] = []
        self.contents: list[Hashable] = []
        self.copy: Any = None
        self._extents: dict[Hashable, Extent] = {}
        self.compact: dict[int, Tensor] = {}  # by the `id` of each tensor

    def add(self, tensor: Tensor) -> Extent:
        """Add the storage of a tensor, or its part of a larger one, unless it is there."""
        storage = tensor.untyped_storage()
        key: Hashable = storage._cdata
        skip, size = 0, storage.nbytes()
        # For the receiver, each part of a larger storage is a storage of its own.
        if size > tensor.nbytes and is_contiguous_part(tensor):
            key = "part", id(tensor)
            skip, size = int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes
        if key not in self._extents:
            self._extents[key] = extent = Extent(self.size, skip, size)
            version = 0 if tensor.is_inference() else tensor._version
            self.sources.append(Source(extent, storage))
            self.contents.append((extent, storage._cdata, version))
            self.size += -(-size // ALIGNMENT) * ALIGNMENT
        return self._extents[key]


def compact(tensor: Tensor) -> Tensor:
    """Return the tensor for torch, or a copy of it if its storage is larger than the tensor."""
    block: Block | None = getattr(tensor, _BLOCK_ATTRIBUTE, None)
    if block is None:
        return compact_storage(tensor)
    if id(tensor) not in block.compact:  # one for all messages that share the block
        block.compact[id(tensor)] = compact_storage(tensor)
    return block.compact[id(tensor)]


def can_place(tensor: Tensor) -> bool:
    """Return whether the bytes of a tensor's storage are all of it: dense, on the CPU."""
    return tensor.dtype in DTYPE_NAMES and is_plain(tensor)


def share(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors for many messages, of which the first writes them for all.

    The result holds other objects than `tensors`: what is sent later is not taken for it.
    """
    if sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided) <= INLINE_BYTES:
        return [*tensors]
    block, found = Block(is_shared=True), []
    for tensor in tensors:
        if not tensor.requires_grad and can_place(tensor):
            tensor = tensor.detach()
            setattr(tensor, _BLOCK_ATTRIBUTE, block)
            block.add(tensor)
        found.append(tensor)
    return found


def place(
    tensors: Iterable[Tensor], *, in_one_block: bool = False
) -> tuple[list[Block], list[Place]] | None:
    """Return the blocks and the places of a message's tensors, None if torch has to send them.

    With `in_one_block` nothing is shared with other messages.
    """
    own, blocks, places = Block(), list[Block](), list[Place]()
    for tensor in tensors:
        name = DTYPE_NAMES.get(tensor.dtype)
        if name is None or not is_plain(tensor) or not has_memory(tensor, tensor.nbytes):
            return None
        block = own if in_one_block else getattr(tensor, _BLOCK_ATTRIBUTE, own)
        index, start, size, offset = -1, 0, 0, int(tensor.storage_offset())
        if tensor.numel():
            if block not in blocks:
                blocks.append(block)
            index, (start, skip, size) = blocks.index(block), block.add(tensor)
            offset -= skip // tensor.itemsize
        shape, strides, needs = tuple(tensor.shape), tensor.stride(), tensor.requires_grad
        places.append(Place(index, start, size, name, offset, shape, strides, needs))
    return blocks, places


def tensors_at(places: Iterable[Place], blocks: Sequence[tuple[Any, int]]) -> list[Tensor]:
    """Return the tensors at the places of a received message.

    `blocks` has the memory of each block, and its bytes.

    Raises:
        ValueError: if a place is malformed, or exceeds its block.
    """
    storages: dict[tuple[int, int], torch.UntypedStorage] = {}
    found = []
    for block, start, size, name, offset, shape, strides, needs_grad in places:
        if min(start, size, offset, *shape, *strides) < 0 or len(shape) != len(strides):
            raise ValueError(f"malformed place of a tensor: {offset, shape, strides}")
        dtype, elements = DTYPES.get(name) or dtype_named(name), math.prod(shape)
        if elements:
            if not 0 <= block < len(blocks) or start + size > blocks[block][1]:
                raise ValueError(f"a tensor exceeds its block: {size} bytes at {start}")
            end = offset + last_element(shape, strides)
            # Elements of an expanded tensor share memory. torch counts up to so many.
            if end * dtype.itemsize > size or elements >= 1 << 63:
                raise ValueError(f"a tensor exceeds its storage of {size} bytes: {shape, strides}")
            if (storage := storages.get((block, start))) is None:
                memory = torch.frombuffer(
                    blocks[block][0], dtype=torch.uint8, count=size, offset=start
                )
                storage = storages[block, start] = memory.untyped_storage()
            tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
        else:
            tensor = torch.empty_strided(shape, strides, dtype=dtype)
        found.append(tensor.requires_grad_() if needs_grad else tensor)
    return found


class ReadyMessage(NamedTuple):
    """A message whose tensors are in memory that its receiver reaches.

    One that is not sent frees that memory as garbage.

    Attributes:
        send: Sends the message, once.
        size: Bytes of its frame.
    """

    send: Callable[[], object]
    size: int


Then = Callable[[ReadyMessage | None], object]
"""Is called once with the message to send, or with None if it has to be sent otherwise."""
