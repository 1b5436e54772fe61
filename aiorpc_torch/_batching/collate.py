"""Collation: many trees of tensors into one, and one tree into its rows.

A tree consists of tensors, arrays and numbers in dicts, tuples, lists and dataclasses.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.tree import children, rebuild

_NUMBERS = (bool, int, float, complex)

Device = torch.device | str | None


def collate_key(value: Any) -> Hashable:
    """Return what trees must have in common: structure, dtypes, shapes and `requires_grad`.

    Raises:
        TypeError: if a leaf cannot be stacked.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.layout, value.device, value.requires_grad
    if type(value) in _NUMBERS:
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise TypeError(f"{value} cannot be stacked: it takes more than 64 bits")
        return type(value).__name__
    if hasattr(value, "__array__"):
        tensor = _as_tensor(value)
        return "array", tensor.dtype, tensor.shape
    if (nodes := children(value)) is None:
        raise TypeError(
            f"a {type(value).__name__} cannot be stacked: pass tensors, arrays and numbers, or "
            "dicts, tuples, lists and dataclasses of them"
        )
    return type(value), tuple(nodes), tuple(map(collate_key, nodes.values()))


class Collator:
    """Stacks on `device`, by blocking copies; on None, where the tensors are."""

    def __init__(self, device: Device = None) -> None:
        self._device = device

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return `torch.stack` of the tensors on the device."""
        return self.to_device(torch.stack([*tensors]))

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device."""
        return tensor if self._device is None else tensor.to(self._device)


def collate(values: Sequence[Any], collator: Collator) -> Any:
    """Return one tree for many of one `collate_key`; its tensors have a new first dimension."""
    first = values[0]
    if isinstance(first, Tensor):
        return collator.stack(values)
    if type(first) in _NUMBERS:
        return collator.to_device(torch.tensor([*values]))
    if hasattr(first, "__array__"):
        return collator.stack([*map(_as_tensor, values)])
    trees = [children(value) or {} for value in values]
    collated = {key: collate([tree[key] for tree in trees], collator) for key in trees[0]}
    return rebuild(first, collated)


def uncollate(tree: Any) -> list[Any] | None:
    """Return the rows of a tree along the first dimension, as tensors of their own on the CPU.

    Return None unless all leaves are tensors with the same first dimension.
    """
    if isinstance(tree, Tensor):
        # One copy from the device; then one per row: a view would keep the whole batch alive, and
        # autograd forbids to change it in place.
        return [row.clone() for row in tree.cpu().unbind(0)] if tree.dim() else None
    nodes = {key: node for key, node in (children(tree) or {}).items() if children(node) != {}}
    columns = {key: uncollate(node) for key, node in nodes.items()}
    lengths = {None if rows is None else len(rows) for rows in columns.values()}
    if len(lengths) != 1 or None in lengths:
        return None
    rows = zip(*(rows or () for rows in columns.values()), strict=True)
    return [rebuild(tree, dict(zip(columns, row, strict=True))) for row in rows]


def _as_tensor(array: Any) -> Tensor:
    flags = getattr(array, "flags", None)
    if flags is not None and not flags.writeable:  # torch would warn
        array = array.copy()
    try:
        return torch.as_tensor(array)
    except ValueError:  # a negative stride
        return torch.as_tensor(array.copy())
