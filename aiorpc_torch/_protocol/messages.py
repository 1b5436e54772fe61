"""Encoding of calls and of results that are sent together.

Calls of one method with arguments of the same kinds form a group, whose arguments are columns.
Results of one kind form a column too. A group costs little, another call in it next to nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, NamedTuple

import msgspec
from torch import Tensor

from .ancestry import BatchId
from .columns import (
    PACKED,
    PLAIN,
    TENSOR,
    CellKind,
    Column,
    direct_cell,
    read_column,
    skip_column,
    write_column,
)
from .pickling import PickledValue, pack
from .plain import dump, is_wire_text, reader
from .tensors import INLINE_BYTES, TensorTable, size_of
from .wire_targets import EncodedTarget, NamedTarget, decode_target

# ── calls to send ─────────────────────────────────────────────────────────────────────────────────

GroupHeader = tuple[Any, ...]
"""The common part of a group: target, stream or not, keyword names, kinds of arguments, ancestors.

The names are None if the arguments are pickled together, as one cell. Ancestor batches are last.
"""

CALL_OVERHEAD = 64  # approximate bytes of a call without arguments


class EncodedCall(NamedTuple):
    """A call to send.

    Attributes:
        due: Deadline of the answer in `time.monotonic()`, or None.
        by_torch: True if the payload travels by torch RPC.
        recorded: The `RecordedCall` if the call is in an autograd context, else None.
    """

    number: int
    header: GroupHeader
    cells: tuple[Any, ...]
    due: float | None
    size: int
    by_torch: bool = False
    recorded: Any = None


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def encode_grouped_call(
    number: int,
    target: EncodedTarget,
    stream: bool,
    arguments: Arguments,
    due: float | None,
    batches: tuple[BatchId, ...] = (),
) -> EncodedCall:
    """Encode a call with ancestor `batches`; copy small arguments. Raises what pickling raises."""
    args, kwargs = arguments
    if kwargs and not are_plain_names(kwargs):
        return _encode_pickled_call(number, target, stream, arguments, due, batches)
    kinds, cells, tensors, size = [], [], [], CALL_OVERHEAD
    for value in (*args, *kwargs.values()) if kwargs else args:
        found = direct_cell(value)
        if found is None:
            return _encode_pickled_call(number, target, stream, arguments, due, batches)
        kind, content = found
        kinds.append(kind)
        cells.append(content)
        if kind is not PLAIN:
            tensors.append(id(value))
            size += size_of(content) if kind is TENSOR else len(content)
        elif type(content) is str or type(content) is bytes:
            size += len(content)
    if len(tensors) > 1 and len(set(tensors)) < len(tensors):  # one passed twice arrives as one
        return _encode_pickled_call(number, target, stream, arguments, due, batches)
    header: GroupHeader = (target, stream, tuple(kwargs), tuple(kinds))
    if batches:
        header += batches
    by_torch = TENSOR in kinds
    if type(target) is PickledValue:
        size += target.size
        by_torch = by_torch or bool(target.tensors)
    by_torch = by_torch or size > INLINE_BYTES
    return EncodedCall(number, header, tuple(cells), due, size, by_torch)


def are_plain_names(names: Iterable[Any]) -> bool:
    """Return whether a message can hold names of keyword arguments: not a str enum, for one."""
    return all(type(each) is str and is_wire_text(each) for each in names)


def target_tensors(target: EncodedTarget) -> Sequence[Tensor]:
    """Return the tensors of a target that travel outside its bytes: of a partial, for example."""
    return target.tensors if type(target) is PickledValue else ()


def _encode_pickled_call(
    number: int,
    target: EncodedTarget,
    stream: bool,
    arguments: Arguments,
    due: float | None,
    batches: tuple[BatchId, ...],
) -> EncodedCall:
    # In one pickle, so that an argument that is passed twice arrives as one object.
    packed = pack(arguments)
    size = CALL_OVERHEAD + packed.size + (target.size if type(target) is PickledValue else 0)
    by_torch = size > INLINE_BYTES or bool(packed.tensors) or bool(target_tensors(target))
    header = (target, stream, None, (PACKED,), *batches)
    return EncodedCall(number, header, (packed,), due, size, by_torch)


# ── a frame of calls ──────────────────────────────────────────────────────────────────────────────


_Index = Annotated[int, msgspec.Meta(ge=0)]


class Group(NamedTuple):
    """Calls of one method with arguments of the same kinds.

    Attributes:
        target: A target by names, or pickled, and the number of tensors of its pickle.
        stream: Whether the items of a generator are wanted.
        names: Names of the keyword arguments, which are the last columns. None: each call's
            arguments are pickled together, as one column.
        size: Number of calls.
        columns: One for each argument.
        batches: Ancestor batches of the calls.
    """

    target: tuple[NamedTarget | bytes, int]
    stream: bool
    names: list[str] | None
    size: int
    columns: list[Column]
    batches: tuple[BatchId, ...] = ()


class Calls(NamedTuple):
    """Calls of a frame or a payload."""

    numbers: list[_Index]
    order: list[_Index]  # index of each call's group; empty if there is only one
    groups: list[Group]
    budgets: list[float | None]  # seconds left for each call; empty if none has a deadline


def encode_calls(calls: Sequence[EncodedCall], now: float, tensors: TensorTable) -> Calls:
    """Group calls; add tensors that travel outside the bytes to `tensors`."""
    groups: dict[GroupHeader, list[tuple[Any, ...]]] = {}
    timed = False
    for call in calls:
        rows = groups.get(call.header)
        if rows is None:
            rows = groups[call.header] = []
        rows.append(call.cells)
        timed = timed or call.due is not None
    order = []
    if len(groups) > 1:
        index = {header: position for position, header in enumerate(groups)}
        order = [index[call.header] for call in calls]
    return Calls(
        [call.number for call in calls],
        order,
        [_write_group(header, rows, tensors) for header, rows in groups.items()],
        [call.due and float(call.due - now) for call in calls] if timed else [],
    )


def _write_target(target: EncodedTarget, tensors: TensorTable) -> Any:
    if type(target) is PickledValue:
        tensors.put(target.ready_tensors())
        return target.data, len(target.tensors)
    return target, 0


def _write_group(header: GroupHeader, rows: list[tuple[Any, ...]], tensors: TensorTable) -> Group:
    target, stream, names, kinds, *batches = header
    target = _write_target(target, tensors)
    cells = zip(*rows, strict=True)
    columns = [
        write_column(kind, column, tensors) for kind, column in zip(kinds, cells, strict=True)
    ]
    return Group(target, stream, names, len(rows), columns, tuple(batches))


SessionKey = tuple[str, int, int]
"""A session: the caller's name and process number, and the connection number."""

_read_calls = reader(Calls)
_read_payload = reader(tuple[SessionKey, int, Calls])


def load_calls(data: bytes) -> Calls:
    """Return the calls of a frame, with encoded groups. Runs no user code.

    Raises:
        ValueError: if the frame is malformed.
    """
    return _checked(_read_calls(data))


def dump_payload(session: SessionKey, context: int, calls: Calls) -> bytes:
    """Return the payload of a call for torch RPC; `context` is an autograd context id or -1."""
    return dump((session, context, calls))


def load_payload(data: bytes) -> tuple[SessionKey, int, Calls]:
    """Return the arguments of `dump_payload`. Raises the same as `load_calls`."""
    session, context, calls = _read_payload(data)
    if len(_checked(calls).numbers) != 1:
        raise ValueError(f"a payload must have one call, got {len(calls.numbers)}")
    return session, context, calls


def _checked(calls: Calls) -> Calls:
    numbers = calls.numbers
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError("calls must have distinct numbers")
    return calls


# ── received calls ────────────────────────────────────────────────────────────────────────────────


DecodeTarget = Callable[[NamedTarget | bytes, Sequence[Tensor]], Any]


class CallGroup:
    """A received group of calls. Use `target` first, then either `calls` or `skip`.

    So the arguments of calls with a rejected target are never unpickled.

    Args:
        group: The encoded group.
        tensors: Tensors of the message; the group takes its own from the front.
        most: Maximum number of calls in the group.
    """

    __slots__ = ("_columns", "_count", "_names", "_target", "_tensors", "batches", "stream")

    def __init__(self, group: Group, tensors: Iterator[Tensor], most: int) -> None:
        self._target, self.stream, self._names, self._count, self._columns, self.batches = group
        self._tensors = tensors
        if not 0 < self._count <= most:
            raise ValueError(f"a group must have 1 to {most} calls, got {self._count}")

    def target(self, decode: DecodeTarget = decode_target) -> Any:
        """Return the target, or a RemoteFailure."""
        target, tensors = self._target
        return decode(target, list(islice(self._tensors, tensors)))

    def calls(self) -> list[Any]:
        """Return the arguments of each call, or a RemoteFailure if they cannot be unpickled."""
        count, names, columns = self._count, self._names, self._columns
        values = [read_column(column, self._tensors, count) for column in columns]
        if names is None:
            return values[0]
        rows = zip(*values, strict=True) if values else [()] * count
        if not names:
            return [(row, {}) for row in rows]
        split = len(columns) - len(names)
        return [(row[:split], dict(zip(names, row[split:], strict=True))) for row in rows]

    def skip(self) -> None:
        """Discard the arguments and their tensors."""
        for column in self._columns:
            skip_column(column, self._tensors)


# ── results ─────────────────────────────────────────────────────────────────────────────────────

ResultKey = int | tuple[int, int, int]
"""A call's number; for an item of a stream: the call's number, the item's number, its credit."""

EncodedResult = tuple[ResultKey, CellKind, Any]
"""A key, and the kind and content of a cell."""


_ITEMS = object()  # stands for the kind of every item of a stream


def encode_reply(results: Sequence[EncodedResult]) -> tuple[bytes, TensorTable]:
    """Return the bytes of results, and the tensors that travel outside the bytes."""
    tensors = TensorTable()
    columns: list[tuple[CellKind, list[ResultKey], list[Any]]] = []
    open_columns: dict[Any, tuple[CellKind, list[ResultKey], list[Any]]] = {}
    for key, kind, content in results:
        # Items of streams stay in order: their column ends where the kind changes.
        name = _ITEMS if type(key) is tuple else kind
        column = open_columns.get(name)
        if column is None or column[0] != kind:
            column = open_columns[name] = kind, [], []
            columns.append(column)
        column[1].append(key)
        column[2].append(content)
    columns_of_kinds = [(keys, write_column(kind, cells, tensors)) for kind, keys, cells in columns]
    return dump(columns_of_kinds), tensors


_read_reply = reader(list[tuple[list[ResultKey], Column]])


def decode_reply(data: bytes, tensors: Sequence[Tensor] = ()) -> list[tuple[ResultKey, Any]]:
    """Return each key with its value, `RemoteFailure`, `HeldResult` or `STREAM_END`.

    Raises an exception of any class if the reply is malformed.
    """
    rest = iter(tensors)
    found: list[tuple[ResultKey, Any]] = []
    for keys, column in _read_reply(data):
        found += zip(keys, read_column(column, rest, len(keys)), strict=True)
    return found
