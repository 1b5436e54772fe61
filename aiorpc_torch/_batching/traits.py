"""The traits of a call, found once as it arrives: its key, weight and member.

An exception in one of the policy's functions reaches only the caller of that call.
"""

from collections.abc import Callable, Hashable
from numbers import Real
from typing import Any

from torch import Tensor

from .collate import collate_key
from .policies import Policy, Round
from .scheduler import DEFAULT_TRAITS, CallTraits

CallArgs = tuple[Any, ...]
"""One call's arguments in the order of the function's parameters."""

TraitsFunction = Callable[[CallArgs, str], CallTraits]
"""Returns the traits of a call from its arguments and its worker's name."""


def traits_function(policy: Policy, name: str, *, stacked: bool) -> TraitsFunction:
    """Return the traits function of the batched function `name`; it raises for invalid calls."""
    if isinstance(policy, Round):
        return _round_traits(policy, stacked)
    key, weight = policy.key, policy.weight

    def traits(args: CallArgs, _: str) -> CallTraits:
        group = None if key is None else _check_hashable("key", key(*args))
        weighs = 1.0 if weight is None else _check_weight(weight(*args), name)
        # Calls that cannot be stacked together wait apart, and delay no other.
        return CallTraits((group, _collate_keys(args)) if stacked else group, weighs)

    has_traits = stacked or key is not None or weight is not None
    return traits if has_traits else lambda _, __: DEFAULT_TRAITS


def _round_traits(policy: Round, stacked: bool) -> TraitsFunction:
    member = policy.member

    def traits(args: CallArgs, caller: str) -> CallTraits:
        name = caller if member is None else _check_hashable("member", member(*args))
        return CallTraits(_collate_keys(args) if stacked else None, member=name)

    return traits


def _collate_keys(args: CallArgs) -> Any:
    return tuple(map(collate_key, args))


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
