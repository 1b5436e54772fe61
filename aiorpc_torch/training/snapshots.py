"""Snapshots: the tensors of a tree in one block of memory, and the rest of the tree pickled.

A version is one tensor on its way, however many tensors it holds: it is encoded, copied and mapped
as one. (tests/unit/training/test_snapshots.py)
"""

import asyncio
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .memory import Memory

ALIGNMENT = 64
"""Bytes to which the tensors of a snapshot are aligned."""

MAX_STATE = 1 << 16
"""Bytes of a tensor that may be the state of a random generator, whose copy costs nothing."""

COPY_ON_LOOP = 1 << 20
"""Maximum bytes of a snapshot that is copied on the event loop, not in a thread."""


class Snapshot(NamedTuple):
    """An immutable copy of a tree.

    Attributes:
        tree: the tree, pickled, with places in `data` for its tensors.
        data: the bytes of its tensors.
    """

    tree: bytes
    data: Tensor

    def load(self) -> Any:
        """Return the tree; its tensors are views of `data`."""
        return _Reader(self).load()


class Place(NamedTuple):
    """The place of a tensor in a snapshot: first byte, dtype, shape and strides."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, data: Tensor) -> Tensor:
        """Return the tensor in the bytes of a snapshot."""
        flat = data.view(self.dtype)
        offset = flat.storage_offset() + self.start // self.dtype.itemsize
        return flat.as_strided(self.shape, self.strides, offset)


class _Writer(pickle.Pickler):
    """A pickler that replaces dense tensors by their places."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.size = 0
        self.tensors: list[tuple[Place, Tensor]] = []
        self._places: dict[Any, Place] = {}

    def persistent_id(self, value: Any) -> Place | None:
        """Return the place of a tensor, None for another object."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        if value.is_quantized or value.is_meta or value.is_nested:
            return None
        if has_parts(value):
            refuse_dtensor(value)
            return None
        # Parameters that share their memory share it in the snapshot.
        key = value.data_ptr(), value.dtype, value.shape, value.stride()
        if (place := self._places.get(key)) is None:
            like = torch.empty_like(value, device="meta")  # dense strides
            place = Place(self.size, value.dtype, tuple(value.shape), like.stride())
            self._places[key] = place
            self.tensors.append((place, value.detach()))
            self.size += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        return place


def has_parts(tensor: Tensor) -> bool:
    """Return whether it is of a subclass whose elements are in other tensors, as a DTensor's."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def refuse_dtensor(tensor: Tensor) -> None:
    """Raise TypeError for a DTensor."""
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            "versions have no DTensors: on all ranks of its mesh call `full_tensor()` of each, and "
            "publish the results"
        )


class _Reader(pickle.Unpickler):
    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(io.BytesIO(snapshot.tree))
        self._data = snapshot.data

    def persistent_load(self, place: Place) -> Tensor:
        """Return the tensor at a place."""
        view = place.view(self._data)
        # torch reads the state of a random generator at the start of its storage (2.11 to 2.15).
        is_state = view.dtype is torch.uint8 and view.dim() == 1 and view.nbytes <= MAX_STATE
        return view.clone() if is_state else view


def snapshot(tree: Any, memory: Memory | None = None) -> Snapshot:
    """Return a snapshot of a tree."""
    taken, copy = begin(tree, memory or Memory())
    copy()
    return taken


async def snapshot_in_thread(tree: Any, memory: Memory | None = None) -> Snapshot:
    """Return a snapshot of a tree; a thread copies large tensors meanwhile."""
    taken, copy = begin(tree, memory or Memory())
    if len(taken.data) > COPY_ON_LOOP:
        await asyncio.to_thread(copy)
    else:
        copy()
    return taken


def begin(tree: Any, memory: Memory) -> tuple[Snapshot, Callable[[], None]]:
    """Return a snapshot without the bytes of its tensors, and what copies them.

    Raises:
        Exception: of any class, if the tree cannot be pickled.
    """
    file = io.BytesIO()
    writer = _Writer(file)
    writer.dump(tree)
    data = memory.take(writer.size)

    def copy() -> None:
        with torch.no_grad():
            for place, tensor in writer.tensors:
                place.view(data).copy_(tensor)

    return Snapshot(file.getvalue(), data), copy
