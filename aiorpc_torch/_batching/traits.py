"""The traits of a call, found once as it arrives: its key, weight and member.

An exception in one of the policy's functions reaches only the caller of that call.
"""

from collections.abc import Callable, Hashable
from numbers import Real
from typing import Any

from torch import Tensor

from .collate import Collation, collate_key, row_count, row_counts
from .policies import Policy, Round
from .scheduler import CallTraits

CallArgs = tuple[Any, ...]
"""One call's arguments in the order of the function's parameters."""

TraitsFunction = Callable[[CallArgs, str], CallTraits]
"""Returns the traits of a call from its arguments and its worker's name."""


def traits_function(
    policy: Policy, name: str, collation: Collation | None
) -> TraitsFunction | None:
    """Return the traits function of the batched function `name`; it raises for invalid calls.

    None if all calls have the default traits.
    """

    def collated(args: CallArgs) -> tuple[Hashable, int | None]:
        """Return the key of a call's trees; with `concat` their rows."""
        if collation is None:
            return None, None
        keys = tuple([collate_key(each, collation) for each in args])
        return keys, _check_rows(args, collation, name) if collation.concat else None

    if isinstance(policy, Round):
        member = policy.member

        def round_traits(args: CallArgs, caller: str) -> CallTraits:
            of = caller if member is None else _check_hashable("member", member(*args))
            return CallTraits(collated(args)[0], member=of)

        return round_traits

    key, weight = policy.key, policy.weight
    if collation is None and key is None and weight is None:
        return None

    def fill_traits(args: CallArgs, _: str) -> CallTraits:
        group = None if key is None else _check_hashable("key", key(*args))
        weighs = 1.0 if weight is None else _check_weight(weight(*args), name)
        if collation is None:
            return CallTraits(group, weighs)
        # Calls that cannot be stacked together wait apart, and delay no other.
        keys, rows = collated(args)
        return CallTraits((group, keys), weighs if rows is None else float(rows))

    return fill_traits


def _check_rows(args: CallArgs, collation: Collation, name: str) -> int:
    if (rows := row_count(args, numbers=True)) is not None:
        collation.padded(rows)
        return rows
    counts = row_counts(args, numbers=True)
    if len(counts) > 1 and None not in counts:
        several = " and ".join(sorted(map(str, counts), key=int))
        raise ValueError(
            f"the arguments of a call of {name} have {several} rows: with concat=True all tensors "
            "and arrays of a call need the same number of rows"
        )
    raise ValueError(
        f"a call of {name} has no rows, or an argument without: with concat=True pass tensors or "
        "arrays whose first dimension is the rows"
    )


def _check_hashable(trait: str, value: Any) -> Hashable:
    # A tensor's hash is its identity: two equal tensors would be two keys.
    if isinstance(value, Tensor):
        raise TypeError(f"a {trait} must be a plain value, got a tensor: return its .item()")
    hash(value)
    return value  # type: ignore[no-any-return]


def _check_weight(weight: Any, name: str) -> float:
    if not isinstance(weight, Real):
        raise ValueError(
            f"the weight of a call of {name} must be a number, got {weight!r}: return float(...)"
        )
    if 0 <= float(weight) < float("inf"):
        return float(weight)
    raise ValueError(
        f"the weight of a call of {name} must be at least 0 and finite, got {weight!r}"
    )
