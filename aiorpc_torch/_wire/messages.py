"""Encoding of calls and of results: one codec for one of them and for thousands.

A frame of calls is a sequence of groups: calls with one head, whose arguments are columns. The head
is the target, the names and the kinds of the arguments; its bytes are made once at the caller, and
read once at the callee, which knows them again. A lone call is a group of one. Results of one kind
form a column too. A group costs little, another call in it next to nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Annotated, Any, NamedTuple

import msgspec
from torch import Tensor

from .ancestry import BatchId
from .buffers import NOTHING, Outside
from .columns import (
    NUMBER_BYTES,
    PACKED,
    PLAIN,
    TENSOR,
    CellKind,
    Cells,
    WireKind,
    direct_cell,
    plain_bytes,
    read_cells,
    read_column,
    read_kind,
    skip_cells,
    write_cells,
    write_kind,
)
from .pickling import PickledValue, pack
from .plain import are_plain_names, dump, reader
from .tensor_table import TensorTable
from .tensors import INLINE_BYTES, size_of
from .wire_targets import EncodedTarget, NamedTarget

# ── calls to send ─────────────────────────────────────────────────────────────────────────────────

CALL_OVERHEAD = 64  # approximate bytes of a call without arguments
MAX_HEADS = 256  # that one end of a connection remembers
MAX_KNOWN_HEAD = 4096  # bytes of a head that is remembered

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

NO_ARGUMENTS: Arguments = (), {}
"""In place of arguments: of a call without, and of one whose arguments were taken. Not changed."""

Carried = tuple[tuple[str, bytes], ...]
"""Context variables that travel with a call: name and pickled value of each."""


class EncodedHead:
    """The common part of a group, as bytes.

    Args:
        stream: Whether the items of a generator are wanted.
        names: Names of the keyword arguments, which are the last columns. None: each call's
            arguments are pickled together, as one column.
        kinds: Kind of each argument.
    """

    __slots__ = ("data", "has_tensors", "is_direct", "kinds", "pickled_target", "size", "target")

    def __init__(
        self,
        target: EncodedTarget,
        stream: bool,
        names: tuple[str, ...] | None,
        kinds: tuple[CellKind, ...],
    ) -> None:
        self.target = target
        self.kinds = kinds
        self.has_tensors = TENSOR in kinds
        self.pickled_target: PickledValue | None = None
        named: Any = target, 0
        if isinstance(target, PickledValue):
            named = target.on_the_wire()
            self.pickled_target = target
            self.has_tensors = self.has_tensors or bool(target.tensors)
        is_named = self.pickled_target is None
        self.is_direct = is_named and all(kind == PLAIN or type(kind) is tuple for kind in kinds)
        self.data = dump((named, stream, names, [write_kind(kind) for kind in kinds]))
        self.size = max(CALL_OVERHEAD, len(self.data))
        if self.pickled_target is not None:
            self.size += self.pickled_target.size - len(self.pickled_target.data)


HeadKey = tuple[EncodedTarget, bool, tuple[str, ...] | None, tuple[CellKind, ...]]
"""The arguments of `EncodedHead`."""


class HeadCache(dict[HeadKey, EncodedHead]):
    """The heads that one end of a connection has made, by what they hold."""

    def __missing__(self, key: HeadKey) -> EncodedHead:
        head, target = EncodedHead(*key), key[0]
        # What is pickled differs from call to call, and so does a fork of an RRef.
        if type(target) is NamedTarget and type(target.on) is not bytes:
            if len(self) >= MAX_HEADS:
                self.clear()
            self[key] = head
        return head


class EncodedCall:
    """A call to send.

    Args:
        cells: One for each argument.
        due: Deadline of the answer in `time.monotonic()`, or None.
        size: Bytes of the arguments, with all tensors: at least half of what they take in a frame.
        batches: Ancestor batches.
        has_tensors: Whether a pickled argument has tensors outside its bytes.

    Attributes:
        size: Bytes of the call.
        is_large: Whether it has no place in a frame with others: it has tensors outside the bytes,
            or many bytes, or has to travel by torch RPC.
        by_torch: Whether it has to travel by torch RPC.
        shared: The `ReadyMessage` once its tensors are where the peer reaches them, else None.
        recorded: The `RecordedCall` if the call is in an autograd context, else None.
        carried: Its context variables.
    """

    __slots__ = (
        "batches",
        "by_torch",
        "carried",
        "cells",
        "due",
        "head",
        "is_large",
        "number",
        "recorded",
        "shared",
        "size",
    )

    def __init__(
        self,
        number: int,
        head: EncodedHead,
        cells: tuple[Any, ...],
        due: float | None,
        size: int,
        batches: tuple[BatchId, ...] = (),
        has_tensors: bool = False,
    ) -> None:
        self.number = number
        self.head = head
        self.cells = cells
        self.due = due
        self.batches = batches
        self.by_torch = False
        self.recorded: Any = None
        self.shared: Any = None
        self.carried: Carried = ()
        size += head.size
        if batches:
            size += sum(len(name) + NUMBER_BYTES for name, _ in batches)
        self.size = size
        self.is_large = size > INLINE_BYTES or head.has_tensors or has_tensors

    def __repr__(self) -> str:
        return f"<EncodedCall {self.number}, {self.size} bytes>"

    def with_pickled(self, packed: PickledValue) -> "EncodedCall":
        """Return a new call like this one, whose arguments are pickled, with another pickle."""
        cells, has_tensors = (packed,), bool(packed.tensors)
        size, batches = packed.size, self.batches
        return EncodedCall(self.number, self.head, cells, self.due, size, batches, has_tensors)

    def renumbered(self, number: int) -> "EncodedCall":
        """Return this call for another connection, where nothing of it was sent yet."""
        call = copy(self)
        call.number, call.shared, call.by_torch = number, None, self.recorded is not None
        return call

    def carry(self, carried: Carried) -> None:
        """Let context variables travel with the call."""
        self.carried = carried
        self.size += sum(len(name) + len(data) + NUMBER_BYTES for name, data in carried)
        self.is_large = self.is_large or self.size > INLINE_BYTES


def encode_call(
    heads: HeadCache,
    number: int,
    target: EncodedTarget,
    stream: bool,
    arguments: Arguments,
    due: float | None,
    batches: tuple[BatchId, ...] = (),
) -> EncodedCall:
    """Encode a call with ancestor `batches`; copy small arguments. Raises what pickling raises."""
    args, kwargs = arguments
    names: tuple[str, ...] | None = ()
    kinds: list[CellKind] = []
    cells: list[Any] = []
    size, has_tensors = 0, False
    if kwargs:
        names = tuple(kwargs) if are_plain_names(kwargs) else None
        args = (*args, *kwargs.values())
    for value in () if names is None else args:
        found = direct_cell(value)
        if found is None:
            names = None
            break
        kind, content = found
        kinds.append(kind)
        cells.append(content)
        if type(content) is bytes:
            size += len(content)
        else:
            size += size_of(content) if kind is TENSOR else plain_bytes(content)
    if names is None or (len(cells) > 1 and _has_repeated_tensor(args, kinds)):
        # In one pickle, so that an argument that is passed twice arrives as one object.
        packed = pack(arguments)
        names, kinds, cells = None, [PACKED], [packed]
        size, has_tensors = packed.size, bool(packed.tensors)
    head = heads[target, stream, names, tuple(kinds)]
    return EncodedCall(number, head, tuple(cells), due, size, batches, has_tensors)


def _has_repeated_tensor(values: Sequence[Any], kinds: Sequence[CellKind]) -> bool:
    tensors = [id(value) for value, kind in zip(values, kinds, strict=True) if kind is not PLAIN]
    return len(set(tensors)) < len(tensors)


# ── a frame of calls ──────────────────────────────────────────────────────────────────────────────


_Index = Annotated[int, msgspec.Meta(ge=0)]


class Group(NamedTuple):
    """Calls with one head.

    Attributes:
        head: The bytes of a `CallHead`.
        numbers: Numbers of the calls. They ascend in the order of their sending in all groups.
        columns: The cells of each argument.
        budgets: Seconds left for each call; empty if none has a deadline.
        batches: Ancestor batches of the calls.
        carried: Their context variables.
    """

    head: bytes
    numbers: list[_Index]
    columns: list[Cells]
    budgets: list[float | None] = []  # noqa: RUF012 - never changed, and msgspec copies it
    batches: tuple[BatchId, ...] = ()
    carried: Carried = ()


def encode_calls(
    calls: Sequence[EncodedCall], now: float, tensors: TensorTable
) -> list[tuple[Any, ...]]:
    """Group calls; add tensors that travel outside the bytes to `tensors`."""
    if len(calls) == 1:
        first = calls[0]
        if first.head.is_direct and not (first.due or first.batches or first.carried):
            return [(first.head.data, (first.number,), _direct_columns(first))]
        return [_encode_group(calls, now, tensors)]
    groups: dict[Any, list[EncodedCall]] = {}
    for call in calls:
        key = call.head, call.batches, call.carried
        if (known := groups.get(key)) is None:
            groups[key] = [call]
        else:
            known.append(call)
    return [_encode_group(each, now, tensors) for each in groups.values()]


def _encode_group(
    calls: Sequence[EncodedCall], now: float, tensors: TensorTable
) -> tuple[Any, ...]:
    first = calls[0]
    head = first.head
    if (target := head.pickled_target) is not None:
        tensors.put(target.ready_tensors())
    numbers, budgets, rows = [], [], []
    for call in calls:
        numbers.append(call.number)
        budgets.append(None if call.due is None else float(call.due - now))
        rows.append(call.cells)
    columns = [
        write_cells(kind, [*cells], tensors)
        for kind, cells in zip(head.kinds, zip(*rows, strict=True), strict=True)
    ]
    if first.carried:
        return head.data, numbers, columns, budgets, first.batches, first.carried
    if first.batches or budgets.count(None) < len(budgets):
        return head.data, numbers, columns, budgets, first.batches
    return head.data, numbers, columns


def _direct_columns(call: EncodedCall) -> Sequence[Any]:
    """Return the columns of one call: that of a small tensor is its bytes."""
    kinds, cells = call.head.kinds, call.cells
    if len(kinds) == 1:
        return cells if type(kinds[0]) is tuple else (cells,)
    return [
        cell if type(kind) is tuple else (cell,) for kind, cell in zip(kinds, cells, strict=True)
    ]


SessionKey = tuple[str, int, int]
"""A session: the caller's name and process number, and the connection number."""

read_groups: Callable[[bytes], list[Group]] = reader(list[Group])
"""Return the groups of a frame; `check_groups` has to check several, and those of several calls."""

_read_payload = reader(tuple[SessionKey, int, list[Group]])


def check_groups(groups: Sequence[Group]) -> None:
    """Raise ValueError if the groups of a frame are malformed."""
    numbers = numbers_of(groups)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError("calls must have distinct numbers")
    for group in groups:
        if not group.numbers or len(group.budgets or group.numbers) != len(group.numbers):
            raise ValueError(
                f"a group of {len(group.numbers)} calls has {len(group.budgets)} budgets"
            )


def dump_payload(session: SessionKey, context: int, groups: Any) -> bytes:
    """Return the payload of a call for torch RPC; `context` is an autograd context id or -1."""
    return dump((session, context, groups))


def load_payload(data: bytes) -> tuple[SessionKey, int, list[Group]]:
    """Return the arguments of `dump_payload`. Raises ValueError if they are malformed."""
    session, context, groups = _read_payload(data)
    check_groups(groups)
    if len(numbers_of(groups)) != 1:
        raise ValueError("a payload must have one call")
    return session, context, groups


def numbers_of(groups: Sequence[Group]) -> list[int]:
    """Return the numbers of all calls."""
    if len(groups) == 1:
        return groups[0].numbers
    return [number for group in groups for number in group.numbers]


# ── received calls ────────────────────────────────────────────────────────────────────────────────


class _NamedOrPickled(NamedTuple):
    """The target of a head: its names, or what `PickledValue.on_the_wire` returns."""

    target: NamedTarget | bytes
    tensors: int
    outside: Outside = NOTHING


_read_head = reader(tuple[_NamedOrPickled, bool, list[str] | None, list[WireKind]])


class CallHead:
    """The head of a received group. Take the target, then either `rows` or `skip`.

    So the arguments of calls with a rejected target are never unpickled.

    Attributes:
        only_kind: the kind of the only argument, None if there are others or a name.

    Raises:
        ValueError: if it is malformed.
    """

    __slots__ = (
        *("only_kind", "kinds", "names", "stream", "target", "target_outside", "target_tensors"),
    )

    def __init__(self, data: bytes) -> None:
        try:
            target, self.stream, self.names, kinds = _read_head(data)
            self.target, self.target_tensors, self.target_outside = target
            self.kinds = [*map(read_kind, kinds)]
        except ValueError as exc:
            raise ValueError(f"malformed head of calls: {exc}") from None
        given = len(self.names or ())
        is_pickled = self.kinds == [PACKED] if self.names is None else PACKED in self.kinds
        if given > len(kinds) or is_pickled is not (self.names is None):
            raise ValueError(f"malformed head of calls: {given} names for {len(kinds)} arguments")
        self.only_kind = self.kinds[0] if len(kinds) == 1 and self.names == [] else None

    def rows(self, group: Group, tensors: Iterator[Tensor]) -> list[Any]:
        """Return the arguments of each call, or a RemoteFailure if they cannot be unpickled.

        A `LongPickle` stands for arguments that have to be loaded apart.

        Raises:
            ValueError: if the group is malformed.
        """
        count, names, columns = len(group.numbers), self.names, group.columns
        if len(columns) != len(self.kinds):
            raise ValueError(f"{len(columns)} columns for {len(self.kinds)} arguments")
        if not columns:
            return [NO_ARGUMENTS] * count
        found: list[list[Any]] = [
            read_cells(kind, cells, tensors, count)
            for kind, cells in zip(self.kinds, columns, strict=True)
        ]
        if names is None:
            return found[0]
        rows = zip(*found, strict=True)
        if not names:
            return [(row, {}) for row in rows]
        split = len(found) - len(names)
        return [(row[:split], dict(zip(names, row[split:], strict=True))) for row in rows]

    def skip(self, group: Group, tensors: Iterator[Tensor]) -> None:
        """Discard the arguments and their tensors."""
        for kind, cells in zip(self.kinds, group.columns, strict=False):
            skip_cells(kind, cells, tensors, len(group.numbers))

    def tensors_of_target(self, tensors: Iterator[Tensor]) -> list[Tensor]:
        """Take the tensors of a pickled target."""
        return [*islice(tensors, self.target_tensors)]


# ── results ─────────────────────────────────────────────────────────────────────────────────────

ResultKey = int | tuple[int, int, int]
"""A call's number; for an item of a stream: the call's number, the item's, its cost in credit."""

EncodedResult = tuple[ResultKey, CellKind, Any]
"""A key, and the kind and content of a cell."""


_ITEMS = object()  # stands for the kind of every item of a stream


def encode_reply(results: Sequence[EncodedResult]) -> tuple[bytes, TensorTable]:
    """Return the bytes of results, and the tensors that travel outside the bytes."""
    tensors = TensorTable()
    if len(results) == 1:
        key, kind, content = results[0]
        return dump(((write_kind(kind), (key,), write_cells(kind, [content], tensors)),)), tensors
    columns: list[tuple[CellKind, list[ResultKey], list[Any]]] = []
    open_columns: dict[Any, tuple[CellKind, list[ResultKey], list[Any]]] = {}
    for key, kind, content in results:
        # Items of streams stay in order: their column ends where the kind changes.
        name = _ITEMS if type(key) is tuple else kind
        column = open_columns.get(name)
        if column is None or column[0] != kind:
            column = open_columns[name] = kind, [key], [content]
            columns.append(column)
        else:
            column[1].append(key)
            column[2].append(content)
    encoded = [
        (write_kind(kind), keys, write_cells(kind, cells, tensors)) for kind, keys, cells in columns
    ]
    return dump(encoded), tensors


read_reply = reader(list[tuple[WireKind, list[ResultKey], Cells]])
"""Return the columns of results: the kind, the keys and the cells of each."""


def decode_reply(data: bytes, tensors: Sequence[Tensor] = ()) -> list[tuple[ResultKey, Any]]:
    """Return each key with its value, as `read_column` gives it. Raises what that raises."""
    rest = iter(tensors)
    found: list[tuple[ResultKey, Any]] = []
    for kind, keys, cells in read_reply(data):
        found += zip(keys, read_column(kind, cells, rest, len(keys)), strict=True)
    return found
