"""Encoding of values as cells, and of cells of one kind as columns.

The cell of a number or short text is the value, and that of a small tensor its bytes. A large
tensor is its own cell. Any other value is pickled. A column of small tensors of one dtype and shape
is one run of bytes with one header.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from .._torch.sendable import clone
from .blocks import share
from .exceptions import RemoteFailure
from .pickling import PickledValue, pack, unpack_or_defer
from .plain import MAX_INT, MIN_INT, is_wire_text
from .staged import delivered
from .tensor_table import TensorTable
from .tensors import (
    INLINE_BYTES,
    TENSOR_CELL,
    TensorKind,
    dtype_named,
    from_bytes,
    size_of,
    tensor_cell,
    wire_dtype,
)

PLAIN = "plain"  # the cell is the value
TENSOR = TENSOR_CELL  # the cell is a tensor, outside the bytes
PACKED = "packed"  # the cell is a PickledValue
FAILED = "failed"  # the cell is a RemoteFailure
ENDED = "ended"  # the end of a stream, without a cell
HELD = "held"  # the cell is a size; the caller collects the value by torch RPC

CellKind = str | TensorKind

WireKind = str | tuple[str, tuple[int, ...], tuple[int, ...]]
"""A kind in a message; that of tensors with its dtype's name."""

Cells = bytes | list[Any]
"""The cells of a column in a message: joined bytes of small tensors, or plain values."""

NUMBER_BYTES = 9
"""Maximum bytes of a number in a message."""

_ATOMS = frozenset((float, bool, type(None)))


def direct_cell(value: Any) -> tuple[CellKind, Any] | None:
    """Return the kind and the cell of a value that needs no pickling, None for any other."""
    return tensor_cell(value) if type(value) is Tensor else plain_cell(value)


def plain_cell(value: Any) -> tuple[CellKind, Any] | None:
    """Return the kind and the cell of a number, bytes or short text, None for any other value."""
    cls = type(value)
    if cls in _ATOMS or (cls is int and MIN_INT <= value <= MAX_INT):
        return PLAIN, value
    if cls is bytes or cls is str:
        is_plain = len(value) <= INLINE_BYTES and (cls is bytes or is_wire_text(value))
        return (PLAIN, value) if is_plain else None
    return None


def encode_cell(value: Any) -> tuple[CellKind, Any]:
    """Return the kind and the cell of any value. Raises what pickling raises.

    Large tensors are not copied; everything else may be changed afterwards.
    """
    return direct_cell(value) or (PACKED, pack(value))


class SharedValue:
    """A value for many receivers, which is encoded once."""

    __slots__ = ("_cell", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._cell: tuple[CellKind, Any] | None = None

    def cell(self) -> tuple[CellKind, Any]:
        """Return the result of `encode_cell` for the value."""
        if self._cell is None:
            kind, content = encode_cell(self.value)
            self._cell = kind, share_cell(kind, content)
        return self._cell


def cell_tensors(kind: CellKind, content: Any) -> Sequence[Tensor]:
    """Return the tensors of a cell that travel outside the bytes."""
    if kind in (PACKED, FAILED):
        return content.tensors  # type: ignore[no-any-return]
    return (content,) if kind == TENSOR else ()


def cell_bytes(kind: CellKind, content: Any) -> int:
    """Return the bytes of a cell, without its constant overhead."""
    if type(kind) is tuple:
        return len(content)
    if kind in (PACKED, FAILED):
        return content.size  # type: ignore[no-any-return]
    if kind == TENSOR:
        return size_of(content)
    return plain_bytes(content)


def plain_bytes(content: Any) -> int:
    """Return the bytes of a plain cell; for a number, the most that it takes."""
    if type(content) is str and not content.isascii():
        content = content.encode()
    return len(content) if type(content) is str or type(content) is bytes else NUMBER_BYTES


def copy_cell(kind: CellKind, content: Any) -> Any:
    """Return the cell with copies of its large tensors."""
    if kind == PACKED:
        copies = [*map(clone, content.ready_tensors())]
        return PickledValue(content.data, copies, content.outside)
    return clone(content) if kind == TENSOR else content


def detach_cell(kind: CellKind, content: Any) -> Any:
    """Return the cell with its tensors detached from the autograd graph."""
    if kind == PACKED:
        detached = [tensor.detach() for tensor in content.ready_tensors()]
        return PickledValue(content.data, detached, content.outside)
    return content.detach() if kind == TENSOR else content


def share_cell(kind: CellKind, content: Any) -> Any:
    """Return the cell for many messages: its large tensors are written to shared memory once."""
    if kind == PACKED:
        content.tensors = share(content.tensors)
    return share((content,))[0] if kind == TENSOR else content


@functools.lru_cache(maxsize=1024)
def write_kind(kind: CellKind) -> WireKind:
    """Return a kind as a message holds it."""
    return kind if isinstance(kind, str) else (wire_dtype(kind[0]), tuple(kind[1]), kind[2])


@functools.lru_cache(maxsize=1024)
def read_kind(kind: WireKind) -> CellKind:
    """Return the argument of `write_kind`.

    Raises:
        ValueError: if there is no such kind.
    """
    if isinstance(kind, tuple):
        return dtype_named(kind[0]), kind[1], kind[2]
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of column: {kind!r}")
    return kind


_KINDS = frozenset((PLAIN, TENSOR, PACKED, FAILED, ENDED, HELD))


def write_cells(kind: CellKind, cells: list[Any], tensors: TensorTable) -> Cells:
    """Return cells of one kind for a message; add tensors outside the bytes to `tensors`."""
    if type(kind) is tuple:
        return b"".join(cells)
    if kind in (PLAIN, HELD):
        return cells
    if kind == TENSOR:
        for tensor in cells:
            tensors.put((tensor,))
        return []
    if kind == PACKED:
        for packed in cells:
            tensors.put(packed.ready_tensors())
        return [packed.on_the_wire() for packed in cells]
    for failure in cells if kind == FAILED else ():
        tensors.put(failure.tensors)
    return [failure.on_the_wire() for failure in cells] if kind == FAILED else []


class StreamEnd:
    """The value that stands for the end of a stream."""


STREAM_END = StreamEnd()


class HeldResult:
    """A result whose value, of `size` bytes, is still at the callee."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


def read_cells(kind: CellKind, cells: Cells, tensors: Iterator[Tensor], count: int) -> list[Any]:
    """Return the `count` values of a column, with a `RemoteFailure` for each unreadable one.

    A `LongPickle` stands for a value that has to be loaded apart.

    Raises:
        ValueError: if the column has another number of cells. Nothing was allocated for them.
    """
    if isinstance(cells, bytes):
        return from_bytes(kind, cells, count)
    if kind == TENSOR:
        found = [*islice(tensors, count)]
        if len(found) < count:
            raise ValueError(f"a column has {count} tensors, the message only {len(found)} more")
        return found
    if kind == ENDED:
        return [STREAM_END] * count
    if len(cells) != count or not isinstance(kind, str):
        raise ValueError(f"a column must have {count} cells, got {len(cells)}")
    if kind == PLAIN:
        return cells
    if kind == PACKED:
        return [
            unpack_or_defer(data, list(islice(tensors, inside)), *outside)
            for data, inside, *outside in cells
        ]
    if kind == FAILED:
        return [RemoteFailure.from_wire(told, tensors) for told in cells]
    return [*map(HeldResult, cells)]


def read_column(kind: WireKind, cells: Cells, tensors: Iterator[Tensor], count: int) -> list[Any]:
    """Return the `count` results of a column, as their caller gets them. Raises as `read_cells`."""
    values = read_cells(read_kind(kind), cells, tensors, count)
    return [*map(delivered, values)] if kind == PACKED else values


def skip_cells(kind: CellKind, cells: Cells, tensors: Iterator[Tensor], count: int) -> None:
    """Discard a column and its tensors in the message."""
    if kind == TENSOR:
        _discard(tensors, count)
    elif kind == PACKED:
        for _, inside, *_ in cells:  # type: ignore[misc]
            _discard(tensors, inside)


def _discard(tensors: Iterator[Tensor], count: int) -> None:
    for _ in islice(tensors, count):
        pass
