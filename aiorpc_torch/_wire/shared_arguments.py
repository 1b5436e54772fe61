"""Arguments of a group call: encoded once for all members, except the values of `each`.

Values that need no pickling are cells, which all members share. Any other arguments are pickled
together, once. (tests/unit/wire/test_shared_arguments.py)
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from .ancestry import BatchId
from .blocks import share
from .columns import PACKED, PLAIN, TENSOR, CellKind, cell_bytes, direct_cell
from .messages import Arguments, EncodedCall, HeadCache
from .pickling import PickledValue, SharedPickle, ValueSlot
from .plain import are_plain_names
from .wire_targets import EncodedTarget


# A dataclass, so that the tensors of a batch's result are found in it (`_torch.tree`).
@dataclass(slots=True, init=False, repr=False, eq=False)
class EachValue:
    """The values of `each`: one for each member of a group, or for each caller of a batch.

    Raises:
        TypeError: if `values` cannot be iterated, or is a str, bytes, a mapping or a set.
    """

    values: tuple[Any, ...]

    def __init__(self, values: Iterable[Any]) -> None:
        if isinstance(values, str | bytes | bytearray | Mapping | Set):
            raise TypeError(f"each() takes a sequence of values, got a {type(values).__name__}")
        try:
            self.values = tuple(values)
        except TypeError as exc:
            raise TypeError(f"each() takes a sequence of values: {exc}") from exc

    def __repr__(self) -> str:
        return f"<each of {len(self.values)} values>"

    def __copy__(self) -> "EachValue":
        return EachValue(self.values)

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(
            "each() must be a direct argument of a call of a group, or what a batched function "
            "returns"
        )


class MemberArguments(NamedTuple):
    """The encoded arguments of one member's call.

    Attributes:
        names: Names of the keyword arguments, None if the arguments are pickled together.
        kinds: Kind of each cell.
        cells: The cells.
        size: Their bytes.
    """

    names: tuple[str, ...] | None
    kinds: tuple[CellKind, ...]
    cells: tuple[Any, ...]
    size: int

    @property
    def packed(self) -> PickledValue | None:
        """Return the pickled arguments, None if they are cells."""
        return self.cells[0] if self.names is None else None

    def with_pickled(self, packed: PickledValue) -> "MemberArguments":
        """Return arguments that are pickled, with another pickle."""
        return self._replace(cells=(packed,), size=packed.size)

    def call(
        self,
        heads: HeadCache,
        number: int,
        target: EncodedTarget,
        due: float | None,
        batches: tuple[BatchId, ...] = (),
    ) -> EncodedCall:
        """Return the call of `target` with these arguments."""
        head, packed = heads[target, False, self.names, self.kinds], self.packed
        has_tensors = packed is not None and bool(packed.tensors)
        return EncodedCall(number, head, self.cells, due, self.size, batches, has_tensors)


def encode_for_members(arguments: Arguments, count: int) -> Sequence[MemberArguments]:
    """Return the arguments of each of `count` members.

    Raises:
        ValueError: if an `each` has another number of values.
        Exception: what pickling raises.
    """
    values = (*arguments[0], *arguments[1].values())
    for value in values:
        if type(value) is EachValue and len(value.values) != count:
            raise ValueError(f"each() has {len(value.values)} values for {count} members")
    return _as_cells(arguments, values, count) or _pickled(arguments, count)


def arguments_of(member: int, arguments: Arguments) -> Arguments:
    """Return the arguments of one member, as they are without `each`."""
    args, kwargs = arguments
    values = _values_of([*kwargs.values()], member)
    return _values_of(args, member), dict(zip(kwargs, values, strict=True))


def _as_cells(
    arguments: Arguments, values: Sequence[Any], count: int
) -> Sequence[MemberArguments] | None:
    """Return the arguments as cells, None if they have to be pickled."""
    kwargs = arguments[1]
    if not count or not are_plain_names(kwargs):
        return None
    columns: list[list[Any]] = []
    for value in values:
        column = [*map(direct_cell, value.values if type(value) is EachValue else (value,))]
        if None in column:
            return None
        columns.append(column)
    differ = [type(value) is EachValue for value in values]
    if count > 1:  # large tensors that all members get are written once
        alike = [at for at, each in enumerate(columns) if not differ[at] and each[0][0] == TENSOR]
        shared = share([columns[at][0][1] for at in alike])
        for at, tensor in zip(alike, shared, strict=True):
            columns[at] = [(TENSOR, tensor)]
    rows = []
    for index in range(count if any(differ) else 1):
        row = [column[index % len(column)] for column in columns]
        if _has_repeated_tensor(_values_of(values, index), row):
            return None
        kinds, cells = tuple(kind for kind, _ in row), tuple(content for _, content in row)
        size = sum(map(cell_bytes, kinds, cells))
        rows.append(MemberArguments(tuple(kwargs), kinds, cells, size))
    return rows if any(differ) else rows * count


def _values_of(values: Sequence[Any], index: int) -> tuple[Any, ...]:
    """Return the values of one member."""
    return tuple(each.values[index] if type(each) is EachValue else each for each in values)


def _has_repeated_tensor(values: Sequence[Any], row: Sequence[Any]) -> bool:
    """Return whether a tensor is passed twice: it must arrive as one object."""
    tensors = [id(value) for value, (kind, _) in zip(values, row, strict=True) if kind is not PLAIN]
    return len(set(tensors)) < len(tensors)


def _pickled(arguments: Arguments, count: int) -> Sequence[MemberArguments]:
    args, kwargs = arguments
    differing: list[EachValue] = []

    def slotted(value: Any) -> Any:
        if type(value) is not EachValue:
            return value
        differing.append(value)
        return ValueSlot(len(differing) - 1)

    template = tuple(map(slotted, args)), {name: slotted(each) for name, each in kwargs.items()}
    shared = SharedPickle(template)
    rows = []
    for index in range(count):
        packed = shared.fill([each.values[index] for each in differing])
        rows.append(MemberArguments(None, (PACKED,), (packed,), packed.size))
    return rows
