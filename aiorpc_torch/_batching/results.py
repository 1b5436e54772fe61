"""The result of a `@batched` function, split into one result per caller."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from .._torch.tree import children
from .._wire.columns import SharedValue
from .._wire.exceptions import copy_exception, ensure_raisable, try_add_note
from ..errors import BatchContractError
from .collate import uncollate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Broadcast(Generic[T]):
    """One result for every caller of the batch: `return Broadcast(model.parameters())`.

    The value is pickled once for all callers. Its large tensors are copied or sent later: do not
    change them in place before every caller has its result.
    """

    value: T


def split_results(result: Any, size: int, name: str, *, stacked: bool = False) -> list[Any]:
    """Return one result for each of `size` callers; an exception among them is to be raised.

    A tuple is one result per caller; if the arguments were `stacked`, it is a tree of tensors. One
    rule for both would take (actions, values) for two results whenever the batch is of two.

    Raises:
        BatchContractError: if `result` is not one result per caller.
    """
    # The usual case first: the check for Sequence takes longer than the rest.
    results = result[:] if type(result) is list else _results_of(result, size, name, stacked)
    if len(results) != size:
        raise BatchContractError(
            f"{name} got a batch of {size} and returned {len(results)} results"
        )
    return _distinct(results, name)


def failure_per_caller(exc: BaseException, size: int, name: str) -> list[Any]:
    """Return one copy of `exc` for each of `size` callers, with `exc` as its cause."""
    if _takes_list_for_tensor(exc):
        try_add_note(
            exc, f"({name} gets lists, one item per caller; stack=True makes them tensors)"
        )
    return [copy_exception(exc, name) for _ in range(size)]


def _takes_list_for_tensor(exc: BaseException) -> bool:
    """Return whether a function may have used a list of its callers' items as a tensor."""
    if isinstance(exc, AttributeError):
        return "'list' object has no attribute" in str(exc)
    return isinstance(exc, TypeError) and "Tensor" in str(exc) and "list" in str(exc)


def _results_of(result: Any, size: int, name: str, stacked: bool) -> list[Any]:
    if isinstance(result, Broadcast):
        # An exception stays unshared: `_distinct` copies it for each caller.
        is_exception = isinstance(result.value, BaseException)
        return [result.value if is_exception else SharedValue(result.value)] * size
    # A str or bytes is a sequence as well, but never meant as one result per caller.
    is_sequence = isinstance(result, Sequence) and not isinstance(result, str | bytes | bytearray)
    if is_sequence and not (stacked and isinstance(result, tuple)):
        return list(result)
    if (results := uncollate(result)) is not None:
        return results
    raise BatchContractError(
        f"{name} got a batch of {size} and returned {_describe(result)}: return a list or tuple as "
        "long as the batch, a tensor (or a tree of tensors) whose first dimension is the batch, or "
        "Broadcast(value)"
    )


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return "a tensor with no dimension"
    if result is None:
        return "None"
    kind = f"a {type(result).__name__}"
    is_leaf = children(result) is None
    return kind if is_leaf else f"{kind} that is not a tree of tensors of one length"


def _distinct(results: list[Any], name: str) -> list[Any]:
    # Two tasks that raise one exception object would write into each other's traceback.
    seen: set[int] = set()
    for index, each in enumerate(results):
        if isinstance(each, BaseException):
            results[index] = (
                copy_exception(each, name) if id(each) in seen else ensure_raisable(each, name)
            )
            seen.add(id(each))
    return results
