"""What a `@batched` body may answer, and whose each part is. Knows no loop, no RPC."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from .._protocol.columns import Shared
from .._protocol.exceptions import raisable, replica
from ..errors import BatchContractError
from .collate import is_structure, rows_of

__all__ = ("Broadcast",)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Broadcast(Generic[T]):
    """One answer for every caller of the batch: `return Broadcast(model.parameters())`.

    It is pickled once, however many there are. Large tensors in it are sent without a copy: do not
    change them in place before every caller has its answer.
    """

    value: T


def outcomes(result: Any, size: int, name: str, *, stacked: bool = False) -> list[Any]:
    """One result for each of `size` callers; an exception among them is that caller's to raise.

    A tuple is one result for each or, if the body was given columns (`stacked`), the columns of a
    nest.

    Raises:
        BatchContractError: if `result` is not one result for each.
    """
    rows = _rows(result, size, name, stacked)
    if len(rows) != size:
        raise BatchContractError(f"{name} got a batch of {size} and returned {len(rows)} results")
    return _distinct(rows, name)


def failures(exc: BaseException, size: int, name: str) -> list[Any]:
    """The exception of a whole body for each of `size` callers: like it, and caused by it."""
    return [replica(exc, name) for _ in range(size)]


def _rows(result: Any, size: int, name: str, stacked: bool) -> list[Any]:
    if isinstance(result, Broadcast):
        # An exception is raised, and each caller needs one of its own.
        raises = isinstance(result.value, BaseException)
        return [result.value if raises else Shared(result.value)] * size
    if type(result) is list:  # mostly; to ask for a Sequence takes longer than all else here
        return result[:]
    # A str or bytes of the right length is a sequence too, of characters nobody meant.
    is_sequence = isinstance(result, Sequence) and not isinstance(result, str | bytes | bytearray)
    if is_sequence and not (stacked and isinstance(result, tuple)):
        return list(result)
    if (rows := rows_of(result)) is not None:
        return rows
    raise BatchContractError(
        f"{name} got a batch of {size} and returned {_describe(result)}: return a list or tuple as "
        "long as the batch, a tensor (or a nest of tensors) whose first dimension is the batch, or "
        "Broadcast(value)"
    )


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return "a tensor with no dimension"
    if result is None:
        return "None"
    kind = f"a {type(result).__name__}"
    return f"{kind} that is no nest of tensors of one length" if is_structure(result) else kind


def _distinct(rows: list[Any], name: str) -> list[Any]:
    # Two tasks that raise the same exception object write into each other's traceback.
    seen: set[int] = set()
    for index, row in enumerate(rows):
        if isinstance(row, BaseException):
            rows[index] = replica(row, name) if id(row) in seen else raisable(row, name)
            seen.add(id(row))
    return rows
