"""The tree of a value, defined once for fences and for collation.

A node is a dict, tuple, list or dataclass; everything else is a leaf. torch's pytree does not
search unregistered dataclasses, so a fence would miss their tensors. torch's `default_collate`
knows no dataclasses either, and makes float64 of floats. (tests/unit/torch/test_tree.py)
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .compat import tree_leaves

_MISSING = object()
_SCALARS = frozenset((bool, int, float, complex, str, bytes, type(None)))


def children(value: Any) -> dict[Any, Any] | None:
    """Return the children of a node by key, index or field; None for a leaf."""
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A field with `init=False` may be unset.
        names = [each.name for each in dataclasses.fields(value)]
        found = ((name, getattr(value, name, _MISSING)) for name in names)
        return {name: child for name, child in found if child is not _MISSING}
    return None


def rebuild(like: Any, changed: dict[Any, Any]) -> Any:
    """Return a copy of the node `like` with the `changed` children in place of its own."""
    if isinstance(like, tuple | list):
        make: Callable[..., Any] = getattr(like, "_make", type(like))  # of a named tuple
        return make(changed.get(index, child) for index, child in enumerate(like))
    made = copy.copy(like)  # `__init__` and `__post_init__` do not run: they expect one item
    if isinstance(made, dict):
        made.update(changed)
    else:
        for name, child in changed.items():
            object.__setattr__(made, name, child)  # the class may be frozen
    return made


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a copy of `tree` with `function` applied to each tensor; other leaves are shared."""
    if isinstance(tree, Tensor):
        return function(tree)
    if not (nodes := children(tree)):
        return tree
    return rebuild(tree, {key: map_tensors(function, node) for key, node in nodes.items()})


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of `tree`, in no particular order; cycles are allowed.

    Leaves of a class that is registered with torch's pytree are searched as well.
    """
    found: list[Tensor] = []
    todo, seen = [tree], dict[int, Any]()
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) not in _SCALARS and id(value) not in seen:
            seen[id(value)] = value  # kept alive: an id is unique only among living objects
            if type(value) is list and _SCALARS.issuperset(map(type, value)):
                continue  # the usual result: the loop below takes 0.2 us a number
            nodes = children(value)
            todo += tree_leaves(value) if nodes is None else nodes.values()
    return found
