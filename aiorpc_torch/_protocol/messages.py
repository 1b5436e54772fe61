"""What goes to a worker at once, and what comes back: how it is laid out in bytes.

Calls of one method with arguments of the same kinds form a group, whose arguments travel as
columns; so do results of one kind. Plain tuples are pickled, not classes: a group costs little, a
call in it next to nothing. Knows no link, no server and no order of arrival.
"""

import functools
import itertools
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.rrefs import Ident
from .ancestry import BatchId
from .columns import (
    PACKED,
    PLAIN,
    TENSOR,
    CellKind,
    inline_cell,
    plain_cell,
    read,
    skip,
    write,
    write_lone,
)
from .targets import Create, Function, Method, Packed, Target, pack, plain, unpack
from .tensors import INLINE_BYTES, Table, size_of

# ── calls, on their way out ─────────────────────────────────────────────────────────────────────

Header = tuple[Any, ...]
"""Of a group: the target, whether it is a stream, names of keywords, kinds of arguments.

Names are None where arguments are packed whole, as one cell. Behind them the batches that wait for
the calls: mostly none.
"""

OVERHEAD = 64  # bytes that any call takes, roughly


class Outgoing(NamedTuple):
    """A call that has not left yet. `due`: by when it must be answered, in `time.monotonic()`.

    `by_torch`: its payload travels by torch RPC; `recorded`: in a context of autograd.
    """

    number: int
    header: Header
    cells: tuple[Any, ...]
    due: float | None
    size: int
    by_torch: bool = False
    recorded: Any = None


Short = tuple[Ident, str] | Packed
"""How a target is named in a message."""


def shorten(target: Target, on: Ident | None) -> Short:
    """How a target is named, with the ident `on` in place of its RRef, if it has one."""
    if on is not None:
        if type(target) is Method:  # most calls
            return on, target.name
        if not isinstance(target, Function | Create):
            target = target._replace(on=on)
    by_name = target.on is None or on is not None
    by_name = by_name and _goes_by_name(getattr(target, "function", None))
    return _packed_once(target) if by_name else pack(target)


def _goes_by_name(function: Any) -> bool:
    if type(function) is types.BuiltinFunctionType:  # or a method of an object, which has a state
        return isinstance(function.__self__, types.ModuleType | type | None)
    return type(function) is types.FunctionType


# One object for all calls of a function: so they form one group.
_packed_once = functools.lru_cache(maxsize=1024, typed=True)(pack)


def outgoing(
    number: int,
    target: Short,
    stream: bool,
    work: "Work",
    due: float | None,
    batches: tuple[BatchId, ...] = (),
) -> Outgoing:
    """A call that `batches` wait for. Small arguments are copied. Raises what pickling raises."""
    args, kwargs = work
    if kwargs and {*map(type, kwargs)} != {str}:  # an enum's, say: the frame has plain names only
        return _whole(number, target, stream, work, due, batches)
    kinds, cells, tensors, size = [], [], [], OVERHEAD
    for value in (*args, *kwargs.values()) if kwargs else args:
        found = plain_cell(value)
        if found is None:
            return _whole(number, target, stream, work, due, batches)
        kind, content = found
        kinds.append(kind)
        cells.append(content)
        if kind is not PLAIN:
            tensors.append(id(value))
            size += size_of(content) if kind is TENSOR else len(content)
        elif type(content) is str or type(content) is bytes:
            size += len(content)
    if len(tensors) > 1 and len(set(tensors)) < len(tensors):  # one passed twice arrives as one
        return _whole(number, target, stream, work, due, batches)
    header: Header = (target, stream, tuple(kwargs), tuple(kinds))
    if batches:
        header += batches
    if type(target) is Packed:
        size += target.size
    by_torch = size > INLINE_BYTES or TENSOR in kinds or bool(outside(target))
    return Outgoing(number, header, tuple(cells), due, size, by_torch)


_NO_TENSORS = Table()


def lone_frame(number: int, target: Short, args: tuple[Any, ...]) -> bytes | None:
    """The data of a frame with one call and nothing beside it: quickly, as most calls are.

    None for a call that takes more: a target that is packed, arguments that do not travel inline.
    """
    if type(target) is not tuple or len(args) > 1:  # one tensor passed twice arrives as one
        return None
    columns = []
    for value in args:
        found = inline_cell(value)
        if found is None:
            return None
        kind, content = found
        columns.append(write_lone(kind, content, _NO_TENSORS))
    return dump(((number,), (), ((target, False, (), 1, columns),), ()))


def outside(target: Short) -> Sequence[Tensor]:
    """The tensors of a target that do not travel in its bytes: of a partial, say."""
    return target.tensors if type(target) is Packed else ()


Work = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments."""


def _whole(
    number: int,
    target: Short,
    stream: bool,
    work: Work,
    due: float | None,
    batches: tuple[BatchId, ...],
) -> Outgoing:
    # In one pickle, so that what is passed twice arrives as one object.
    packed = pack(work)
    size = OVERHEAD + packed.size + (target.size if type(target) is Packed else 0)
    by_torch = size > INLINE_BYTES or bool(packed.tensors) or bool(outside(target))
    header = (target, stream, None, (PACKED,), *batches)
    return Outgoing(number, header, (packed,), due, size, by_torch)


# ── a frame of calls ──────────────────────────────────────────────────────────────────────────────


class Calls(NamedTuple):
    """The calls of a frame, or of a payload."""

    numbers: Sequence[int]
    order: Sequence[int]  # of which group each is; empty: there is only one
    groups: Sequence[Any]
    budgets: Sequence[float | None]  # seconds left for each call; empty: none has a limit


def lay_out(calls: Sequence[Outgoing], now: float, tensors: Table) -> Calls:
    """Calls in groups; what stays outside the message's bytes is added to `tensors`."""
    if len(calls) == 1:  # mostly
        number, header, cells, due, *_ = calls[0]
        budgets = () if due is None else (float(due - now),)
        return Calls((number,), (), (_write_lone(header, cells, tensors),), budgets)
    groups: dict[Header, list[tuple[Any, ...]]] = {}
    timed = False
    for call in calls:
        rows = groups.get(call.header)
        if rows is None:
            rows = groups[call.header] = []
        rows.append(call.cells)
        timed = timed or call.due is not None
    order: Sequence[int] = ()
    if len(groups) > 1:
        index = {header: position for position, header in enumerate(groups)}
        order = [index[call.header] for call in calls]
    return Calls(
        [call.number for call in calls],
        order,
        [_write_group(header, rows, tensors) for header, rows in groups.items()],
        [call.due and float(call.due - now) for call in calls] if timed else (),
    )


def _write_lone(header: Header, cells: tuple[Any, ...], tensors: Table) -> Any:
    target, stream, names, kinds, *batches = header
    columns = [write_lone(kind, cell, tensors) for kind, cell in zip(kinds, cells, strict=True)]
    return _write_target(target, tensors), stream, names, 1, columns, *batches


def _write_target(target: Short, tensors: Table) -> Any:
    if type(target) is Packed:
        tensors.put(target.ready())
        return target.data, len(target.tensors)
    return target


def _write_group(header: Header, rows: list[tuple[Any, ...]], tensors: Table) -> Any:
    target, stream, names, kinds, *batches = header
    target = _write_target(target, tensors)
    cells = zip(*rows, strict=True)
    columns = [write(kind, column, tensors) for kind, column in zip(kinds, cells, strict=True)]
    return target, stream, names, len(rows), columns, *batches


def dump(fields: tuple[Any, ...]) -> bytes:
    """The bytes of a message with these fields, in their order."""
    return pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)


def load_calls(data: bytes) -> Calls:
    """The calls of a frame, their groups still as they travel. Runs nobody's code.

    Raises:
        TypeError: if it is no frame of calls; or what reading plain values raises.
    """
    return _checked(Calls(*plain(data)))


def dump_payload(session: tuple[str, int, int], context: int, calls: Calls) -> bytes:
    """The bytes of a call whose payload travels by torch RPC; `context` of autograd, or -1."""
    return dump((session, context, *calls))


def load_payload(data: bytes) -> tuple[tuple[str, int, int], int, Calls]:
    """What `dump_payload` was given. Raises as `load_calls`."""
    session, context, *calls = plain(data)
    if tuple(map(type, session)) != (str, int, int) or type(context) is not int:
        raise TypeError("no payload: it names no session")
    checked = _checked(Calls(*calls))
    if len(checked.numbers) != 1:
        raise TypeError("a payload is of one call")
    return session, context, checked


def _checked(calls: Calls) -> Calls:
    # All of them at once; what a field holds is looked at by whoever uses it.
    if tuple(map(type, calls)) not in _SHAPES:
        raise TypeError(f"no calls: {[type(field).__name__ for field in calls]}")
    numbers = calls.numbers
    if set(map(type, numbers)) != _INTS or len(set(numbers)) < len(numbers):
        raise TypeError("no calls: they are numbered, each with a number of its own")
    return calls


_INTS = {int}
_SHAPES = frozenset(itertools.product((list, tuple), repeat=4))  # of the fields of calls


# ── calls, arrived ──────────────────────────────────────────────────────────────────────────────


Unpack = Callable[[bytes, Sequence[Tensor]], Any]


class Group:
    """The calls of one target: first `target`, and then either `calls` or `skip`.

    In this order, so that nothing is unpickled of calls whose target is refused. Of `most` calls
    at most, and of the tensors that `tensors` has next.
    """

    __slots__ = ("_columns", "_count", "_names", "_target", "_tensors", "batches", "stream")

    def __init__(self, group: Any, tensors: Iterator[Tensor], most: int) -> None:
        self._target, self.stream, self._names, self._count, self._columns, *batches = group
        self.batches: Sequence[BatchId] = batches  # that wait for them
        self._tensors = tensors
        if not 0 < self._count <= most:
            raise ValueError(f"a group of {self._count} calls in a message of {most}")

    def target(self, unpack: Unpack = unpack) -> Any:
        """What is called: whatever was packed, or a Failure."""
        first, second = self._target
        if isinstance(first, bytes):
            return unpack(first, list(islice(self._tensors, second)))
        return Method(first, second)

    def calls(self) -> list[Any]:
        """Of each call the arguments, or a Failure if they cannot be read."""
        count, names, columns = self._count, self._names, self._columns
        values = [read(column, self._tensors, count) for column in columns]
        if names is None:
            return values[0]
        rows = zip(*values, strict=True) if values else [()] * count
        if not names:
            return [(row, {}) for row in rows]
        split = len(columns) - len(names)
        return [(row[:split], dict(zip(names, row[split:], strict=True))) for row in rows]

    def skip(self) -> None:
        """Leave the arguments unread; the next group finds its own tensors."""
        for column in self._columns:
            skip(column, self._tensors)


# ── results ─────────────────────────────────────────────────────────────────────────────────────

Key = int | tuple[int, int, int]
"""A call's number; for a stream, its number, the item's, and what the item takes of the credit."""

Result = tuple[Key, CellKind, Any]
"""Whose it is, and what it is: a cell."""


ITEMS = object()


def dump_results(results: Sequence[Result]) -> tuple[bytes, Table]:
    """The bytes of results, and the tensors that stay outside of them."""
    tensors = Table()
    if len(results) == 1:  # mostly
        key, kind, content = results[0]
        lone = [([key], write_lone(kind, content, tensors))]
        return pickle.dumps(lone, pickle.HIGHEST_PROTOCOL), tensors
    columns: list[tuple[CellKind, list[Key], list[Any]]] = []
    open_columns: dict[Any, tuple[CellKind, list[Key], list[Any]]] = {}
    for key, kind, content in results:
        # Items of streams stay in order: a column of them ends where their kind changes.
        name = ITEMS if type(key) is tuple else kind
        column = open_columns.get(name)
        if column is None or column[0] != kind:
            column = open_columns[name] = kind, [], []
            columns.append(column)
        column[1].append(key)
        column[2].append(content)
    plain = [(keys, write(kind, cells, tensors)) for kind, keys, cells in columns]
    return pickle.dumps(plain, pickle.HIGHEST_PROTOCOL), tensors


def load_results(data: bytes, tensors: Sequence[Tensor] = ()) -> list[tuple[Key, Any]]:
    """What `dump_results` made: each key with its value, `Failure`, `Held` or `END`.

    Raises whatever it raises to read what is none.
    """
    rest = iter(tensors)
    found: list[tuple[Key, Any]] = []
    for keys, column in plain(data):
        found += zip(keys, read(column, rest, len(keys)), strict=True)
    return found
