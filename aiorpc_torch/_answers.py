"""What a `@batched` body may answer, and whose each part is. Knows tensors, no loop, no RPC."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from ._exceptions import raisable, replica
from .errors import BatchContractError

__all__ = ("Broadcast",)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Broadcast(Generic[T]):
    """One answer for every caller of the batch: `return Broadcast(model.parameters())`."""

    value: T


def outcomes(result: Any, size: int, name: str) -> list[Any]:
    """One result for each of `size` callers; an exception among them is that caller's to raise.

    Raises:
        BatchContractError: if `result` is not one result for each.
    """
    rows = _rows(result, size, name)
    if len(rows) != size:
        raise BatchContractError(f"{name} got a batch of {size} and returned {len(rows)} results")
    return _distinct(rows, name)


def failures(exc: BaseException, size: int, name: str) -> list[Any]:
    """The exception of a whole body for each of `size` callers: like it, and caused by it."""
    return [replica(exc, name) for _ in range(size)]


def _rows(result: Any, size: int, name: str) -> list[Any]:
    if isinstance(result, Broadcast):
        return [result.value] * size
    if isinstance(result, Tensor) and result.dim() > 0:
        return list(result.unbind(0))
    # A str or bytes of the right length is a sequence too, of characters nobody meant.
    if isinstance(result, Sequence) and not isinstance(result, str | bytes | bytearray):
        return list(result)
    raise BatchContractError(
        f"{name} got a batch of {size} and returned {_describe(result)}: return a list or tuple "
        "as long as the batch, a tensor whose first dimension is the batch, or Broadcast(value)"
    )


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return "a tensor with no dimension"
    return "None" if result is None else f"a {type(result).__name__}"


def _distinct(rows: list[Any], name: str) -> list[Any]:
    # Two tasks that raise the same exception object write into each other's traceback.
    seen: set[int] = set()
    for index, row in enumerate(rows):
        if isinstance(row, BaseException):
            rows[index] = replica(row, name) if id(row) in seen else raisable(row, name)
            seen.add(id(row))
    return rows
