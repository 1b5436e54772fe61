"""What a policy says of a call as it arrives: its key, its weight, who it is, whether it stacks.

The policy's functions are the user's: each is called once for a call, and what it raises is that
caller's alone. Knows arguments, and no queue.
"""

from collections.abc import Callable, Hashable
from numbers import Real
from typing import Any

from torch import Tensor

from .collate import kind_of
from .policies import Policy, Round
from .scheduler import PLAIN, Traits

Row = tuple[Any, ...]
"""One caller's arguments in the order of the body's parameters."""

Admission = Callable[[Row, str], Traits]
"""Of a row and the worker that it comes from."""


def admission(policy: Policy, name: str, *, stacked: bool) -> Admission:
    """How calls of the function `name` are let in. What it returns raises for a bad call."""
    if isinstance(policy, Round):
        return _contributions(policy, stacked)
    key, weight = policy.key, policy.weight

    def traits(row: Row, _: str) -> Traits:
        own = None if key is None else _identity("key", key(*row))
        weighs = 1.0 if weight is None else _checked(weight(*row), name)
        return Traits((own, _kinds(row)) if stacked else own, weighs)

    return traits if stacked or key is not None or weight is not None else _plain


def _plain(row: Row, caller: str) -> Traits:
    return PLAIN


def _contributions(policy: Round, stacked: bool) -> Admission:
    member = policy.member

    def traits(row: Row, caller: str) -> Traits:
        who = caller if member is None else _identity("member", member(*row))
        return Traits(_kinds(row) if stacked else None, member=who)

    return traits


def _kinds(row: Row) -> Any:
    return tuple(map(kind_of, row))


def _identity(what: str, value: Any) -> Hashable:
    # A tensor has a hash, but its own: no two of them are the same key.
    if isinstance(value, Tensor):
        raise TypeError(f"a {what} is a plain value, not a tensor: take its .item()")
    hash(value)
    return value  # type: ignore[no-any-return]


def _checked(weight: Any, name: str) -> float:
    if isinstance(weight, Real) and 0 <= float(weight) < float("inf"):
        return float(weight)
    raise ValueError(f"the weight of a call of {name} is at least 0 and finite, not {weight!r}")
