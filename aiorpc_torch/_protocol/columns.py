"""Values as cells, and the cells of one kind as a column: many small values for the price of few.

A plain number or text is its own cell, a small tensor's cell is its bytes, a large one stays a
tensor, anything else is packed. A column of small tensors of one dtype and shape is one run of
bytes with one header.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from .exceptions import Failure
from .targets import Packed, pack, unpack
from .tensors import (
    INLINE_BYTES,
    Kind,
    Table,
    compact,
    from_bytes,
    read_kind,
    size_of,
    small_bytes,
    write_kind,
)

PLAIN = "plain"  # the cell is the value
TENSOR = "tensor"  # the cell is a tensor that stays outside the bytes
PACKED = "packed"  # the cell is a Packed
FAILED = "failed"  # the cell is a Failure
ENDED = "ended"  # of a stream: there is no cell
HELD = "held"  # the cell is a number of bytes: the value is collected by torch RPC

CellKind = str | Kind

Column = tuple[Any, Any]
"""What stands for it in a message: a kind in plain words, and the cells as plain data."""

_ATOMS = frozenset((int, float, bool, complex, type(None)))


def plain_cell(value: Any) -> tuple[CellKind, Any] | None:
    """The kind and the cell of a tensor or a small plain value, or None for all others."""
    found = inline_cell(value)
    if found is None and type(value) is Tensor and not value.is_cuda:
        return TENSOR, compact(value)
    return found


def inline_cell(value: Any) -> tuple[CellKind, Any] | None:
    """The kind and the cell of a small tensor or plain value, or None for all others."""
    cls = type(value)
    if cls is Tensor:
        data = small_bytes(value)
        return None if data is None else ((value.dtype, value.shape), data)
    if cls in _ATOMS or ((cls is str or cls is bytes) and len(value) <= INLINE_BYTES):
        return PLAIN, value
    return None


def cell(value: Any) -> tuple[CellKind, Any]:
    """The kind and the cell of any value, which may be changed afterwards.

    Only large tensors are not copied. Raises what pickling raises.
    """
    return plain_cell(value) or (PACKED, pack(value))


class Shared:
    """One value for many receivers: its cell is made once."""

    __slots__ = ("_cell", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._cell: tuple[CellKind, Any] | None = None

    def cell(self) -> tuple[CellKind, Any]:
        """As `cell` of the value."""
        if self._cell is None:
            self._cell = cell(self.value)
        return self._cell


def loose(kind: CellKind, content: Any) -> Sequence[Tensor]:
    """The tensors of a cell that stay outside the bytes."""
    if kind == PACKED:
        return content.tensors  # type: ignore[no-any-return]
    return (content,) if kind == TENSOR else ()


def bulk(kind: CellKind, content: Any) -> int:
    """Bytes that a cell takes, beside what any cell takes."""
    if kind == PACKED:
        return content.size  # type: ignore[no-any-return]
    if kind == FAILED:
        return len(content.text) + len(content.pickled or b"")
    if kind == TENSOR:
        return size_of(content)
    return len(content) if isinstance(content, bytes | str) else 0


def copied(kind: CellKind, content: Any) -> Any:
    """The cell, with large tensors of its own too."""
    if kind == PACKED:
        return Packed(content.data, [tensor.clone() for tensor in content.ready()])
    return content.clone() if kind == TENSOR else content


def without_graph(kind: CellKind, content: Any) -> Any:
    """The cell, whose tensors require no gradient."""
    if kind == PACKED:
        return Packed(content.data, [tensor.detach() for tensor in content.ready()])
    return content.detach() if kind == TENSOR else content


def write(kind: CellKind, cells: Sequence[Any], tensors: Table) -> Column:
    """The column of these cells; what stays outside the bytes is added to `tensors`."""
    if kind in (PLAIN, HELD):
        return kind, list(cells)
    if kind == TENSOR:
        for tensor in cells:
            tensors.put((tensor,))
        return kind, len(cells)
    if kind == PACKED:
        for packed in cells:
            tensors.put(packed.ready())
        return kind, [(packed.data, len(packed.tensors)) for packed in cells]
    if kind == FAILED:
        return kind, [failure.plain() for failure in cells]
    if kind == ENDED:
        return kind, len(cells)
    assert isinstance(kind, tuple)
    return write_kind(kind), (b"".join(cells), len(cells))


def write_lone(kind: CellKind, content: Any, tensors: Table) -> Column:
    """The column of one cell."""
    if kind is PLAIN:
        return PLAIN, [content]
    if type(kind) is tuple:
        return write_kind(kind), (content, 1)
    return write(kind, [content], tensors)


class End:
    """What the end of a stream is read as."""


END = End()


class Held:
    """What a result is read as whose value is still at the callee. `size`: its bytes."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


def read(column: Column, tensors: Iterator[Tensor], count: int) -> list[Any]:
    """The `count` values of a column. One that cannot be read is a `Failure` in its place.

    Raises:
        ValueError: if it is not a column of so many; nothing was made then of what it declares.
    """
    kind, cells = column
    if type(kind) is tuple and cells[1] == count:
        return from_bytes(read_kind(kind), cells[0], count)
    if _size(kind, cells) != count:
        raise ValueError(f"a column of {_size(kind, cells)!r} cells in place of {count}")
    if kind == PLAIN:
        return cells  # type: ignore[no-any-return]
    if kind == TENSOR:
        found = [*islice(tensors, count)]
        if len(found) < count:
            raise ValueError("a column of tensors that are not in the message")
        return found
    if kind == PACKED:
        return [unpack(data, list(islice(tensors, inside))) for data, inside in cells]
    if kind == FAILED:
        return [Failure(*plain) for plain in cells]
    if kind == ENDED:
        return [END] * count
    if kind == HELD:
        return [*map(Held, cells)]
    raise ValueError(f"no column is of kind {kind!r}")


def skip(column: Column, tensors: Iterator[Tensor]) -> None:
    """Leave a column unread: only the tensors that it has in the message are taken off."""
    kind, cells = column
    if kind == TENSOR:
        _take(tensors, cells)
    elif kind == PACKED:
        for _, inside in cells:
            _take(tensors, inside)


def _take(tensors: Iterator[Tensor], count: int) -> None:
    for _ in islice(tensors, count):
        pass


def _size(kind: Any, cells: Any) -> Any:
    if kind in (TENSOR, ENDED):
        return cells
    return cells[1] if type(kind) is tuple else len(cells)
