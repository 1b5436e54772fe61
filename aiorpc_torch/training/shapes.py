"""The tensors of a tree by their places in it, so that an error can name one.

(tests/unit/training/test_shapes.py)
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Size, Tensor


def shapes(tree: Any) -> dict[str, Size]:
    """Return the shape of each tensor in mappings, sequences and dataclasses, by its place."""
    return {place or "the tree": tensor.shape for place, tensor in _tensors(tree, "")}


def _tensors(tree: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield place, tree
        return
    for key, value in _parts(tree):
        yield from _tensors(value, f"{place}{key}")


def _parts(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in tree.items())
    elif isinstance(tree, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        yield from ((f".{name}", getattr(tree, name)) for name in names)


def check_shapes(first: Mapping[str, Size], tree: Any) -> None:
    """Check that a tree has each tensor of the first version, in its shape.

    It may have more, such as those of an optimizer that has made its first step.

    Raises:
        ValueError: if it does not.
    """
    found = shapes(tree)
    for place, shape in first.items():
        if place not in found:
            raise ValueError(f"a version must have the tensors of the first one, lacks {place}")
        if found[place] != shape:
            raise ValueError(
                f"a version must have the shapes of the first one: {place} must be "
                f"{tuple(shape)}, got {tuple(found[place])}"
            )
