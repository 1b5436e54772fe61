"""The result of a `@batched` function, split into one result per caller.

The policy says what a result is. That of a `Fill` is a sequence, with one result for each caller.
That of a `Round` is for all of its callers. `Broadcast` and `each` say the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from .._aio.own_frames import behind_own_frames
from .._torch.tree import children
from .._wire.columns import SharedValue
from .._wire.exceptions import copy_exception, ensure_raisable, text_of, try_add_note
from .._wire.shared_arguments import EachValue
from ..errors import BatchContractError
from .collate import Rows, cut, is_array, row_count, uncollate

T = TypeVar("T")

_ENTRIES_HINT = (
    ": each step has one entry for each caller, also for those that have ended. "
    "`StopAsyncIteration()` as an entry ends its caller"
)

ENDED: Any = object()
"""The entry of a caller whose stream has ended, and what a generator's last step returns."""


@dataclass(frozen=True, slots=True)
class Broadcast(Generic[T]):
    """One result for every caller of a batch of `Fill`: `return Broadcast(model.parameters())`.

    The result of a `Round` is for every caller without it. The value is pickled once for all
    callers. Its large tensors are copied or sent later: do not change them in place before every
    caller has its result.
    """

    value: T


def split_results(
    result: Any,
    size: int,
    name: str,
    *,
    stacked: bool = False,
    for_all: bool = False,
    rows: Rows | None = None,
    verb: str = "returned",
) -> list[Any]:
    """Return one result for each of `size` callers; an exception among them is to be raised.

    A tuple is one result per caller; if the arguments were `stacked`, it is a tree of tensors. One
    rule for both would take (actions, values) for two results whenever the batch is of two.

    Args:
        stacked: Whether its arguments were stacked, or joined by rows.
        for_all: Whether a result is for all callers: that of a round.
        rows: Rows that the function got (default: one of each caller).
        verb: "yielded" for a generator, for errors.
    """
    # The usual case first, as fast as it can be.
    if type(result) is list and len(result) == size and rows is None and not for_all:
        for value in result:
            if isinstance(value, BaseException):
                return _distinct(result[:], name)
        return result[:]
    if type(result) is EachValue:
        result = [*map(_own_row, result.values)]
    elif for_all or type(result) is Broadcast:
        value = result.value if type(result) is Broadcast else result
        shared = value if isinstance(value, BaseException) else SharedValue(value)
        return _distinct([shared] * size, name)  # each gets its own copy of an exception
    elif _is_sequence(result, stacked):
        result = [*result]
    length = len(result) if type(result) is list else row_count(result)
    total, counts = (size, None) if rows is None else rows
    if length != total:
        do = verb.removesuffix("ed")
        if length is None and rows is None:
            remedy = (
                f": {do} a list or tuple as long as the batch, a tensor or an array (or a tree of "
                "them) whose first dimension is the batch, or Broadcast(value)"
            )
        elif length is None:
            remedy = (
                f": {do} a tensor or an array (or a tree of them) with one row for each row of its "
                "arguments, or Broadcast(value)"
            )
        elif rows is not None:
            remedy = f": {do} one row for each row of its arguments"
        else:
            remedy = _ENTRIES_HINT if verb == "yielded" else ""
        batch = f"a batch of {size}" if rows is None else f"a batch of {size} with {total} rows"
        got = _describe(result) if length is None else f"{length} results"
        raise BatchContractError(f"{name} got {batch} and {verb} {got}{remedy}")
    if type(result) is not list:
        results = uncollate(result, size, counts)
    elif counts is None:
        results = result[:size]
    else:
        results = [*map(_first_exception, cut(result, counts))]
    return _distinct(results, name)


def with_ends(entries: Any, size: int, *, stacked: bool) -> Any:
    """Return the entries of a generator's step, with ENDED for each end of a caller."""
    if type(entries) is Broadcast and _is_end(entries.value):
        return [ENDED] * size
    if type(entries) is EachValue:
        entries = [*map(_own_row, entries.values)]
    if not _is_sequence(entries, stacked):
        return entries
    return [ENDED if _is_end(each) else each for each in entries]


def _is_end(entry: Any) -> bool:
    return isinstance(entry, _STOPS) or entry is StopAsyncIteration or entry is StopIteration


_STOPS = StopAsyncIteration, StopIteration


def failure_per_caller(exc: BaseException, size: int, name: str) -> list[Any]:
    """Return one copy of `exc` for each of `size` callers, with `exc` as its cause."""
    # The callers' copies show it. Not by `exc.__traceback__ =`, which a user's class may refuse.
    BaseException.with_traceback(exc, behind_own_frames(exc.__traceback__))
    # The function may have used a list of its callers' items as a tensor.
    words = {AttributeError: ("'list' object has no attribute",), TypeError: ("Tensor", "list")}
    for kind, used in words.items():
        if isinstance(exc, kind) and all(word in text_of(exc) for word in used):
            hint = f"({name} gets lists, one item per caller; stack=True makes them tensors)"
            try_add_note(exc, hint)
    return [copy_exception(exc, name) for _ in range(size)]


def _own_row(value: Any) -> Any:
    """Return a value of `each`: a row of a tensor without the rest of its storage, on the CPU."""
    is_row = isinstance(value, Tensor) and value._is_view()
    return value.cpu().clone() if is_row else value


def _is_sequence(result: Any, stacked: bool) -> bool:
    # A str or bytes is a sequence as well, but never meant as one result per caller.
    is_sequence = isinstance(result, Sequence) and not isinstance(result, str | bytes | bytearray)
    return is_sequence and not (stacked and isinstance(result, tuple))


def _first_exception(results: list[Any]) -> Any:
    """Return the first exception or end among one caller's rows, or else all of them."""
    ends = (each for each in results if isinstance(each, BaseException) or each is ENDED)
    return next(ends, results)


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return "a tensor with no dimension"
    if is_array(result):
        return "an array with no dimension"
    if result is None:
        return "None"
    kind = f"a {type(result).__name__}"
    is_leaf = children(result) is None
    return kind if is_leaf else f"{kind} that is not a tree of tensors or arrays of one length"


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
