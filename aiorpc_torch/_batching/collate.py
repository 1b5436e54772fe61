"""Collation: many trees of tensors into one, and one tree into its rows or runs of rows.

A tree consists of tensors, arrays and numbers in dicts, tuples, lists and dataclasses.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.tree import children, map_tensors, rebuild

_NUMBERS = (bool, int, float, complex)

Device = torch.device | str | None


@dataclass(frozen=True, slots=True)
class Collation:
    """The way in which the arguments of a batch become one tree.

    Attributes:
        concat: Whether rows are joined along the first dimension, not stacked along a new one.
        pad_to: Ascending numbers of rows that the function may get (default: any number).
        device: Device of the tensors (default: None, where they are).
    """

    concat: bool = False
    pad_to: tuple[int, ...] = ()
    device: Device = None

    def padded(self, rows: int) -> int:
        """Return the number of rows that the function gets for so many."""
        if not self.pad_to:
            return rows
        index = bisect_left(self.pad_to, rows)
        if index == len(self.pad_to):
            raise ValueError(
                f"{rows} rows are more than the largest of pad_to={self.pad_to}: pass fewer, or "
                "add a larger size"
            )
        return self.pad_to[index]


class Rows(NamedTuple):
    """The rows that a function gets: their number, with padding, and those of each caller.

    Without `counts` each caller has one.
    """

    total: int
    counts: list[int] | None


def collate_key(value: Any, collation: Collation) -> Hashable:
    """Return what trees must have in common: structure, dtypes, shapes and `requires_grad`."""
    first = int(collation.concat)  # dimension from which on shapes must be equal
    if isinstance(value, Tensor):
        shape = value.shape[first:] if first else value.shape
        return value.dtype, shape, value.layout, value.device, value.requires_grad
    if type(value) in _NUMBERS:
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise TypeError(f"{value} cannot be stacked: it takes more than 64 bits")
        return type(value).__name__
    if is_array(value):
        array = _as_array(value)
        if array.dtype.hasobject:
            raise TypeError("an array of objects cannot be stacked: pass one of numbers")
        _as_tensor(array[:0] if array.ndim else array)  # a TypeError for text, for example
        return "array", array.dtype, array.shape[first:]
    if (nodes := children(value)) is None:
        raise TypeError(
            f"a {type(value).__name__} cannot be stacked: pass tensors, arrays and numbers, or "
            "dicts, tuples, lists and dataclasses of them"
        )
    return (
        type(value),
        tuple(nodes),
        tuple([collate_key(each, collation) for each in nodes.values()]),
    )


def row_counts(tree: Any, *, numbers: bool = False) -> set[int | None]:
    """Return the first dimensions of the leaves of a tree; None is that of a leaf without one.

    Leave out numbers if `numbers`: in an argument they are for each of its rows.
    """
    return {*_row_counts(tree, numbers)}


def _row_counts(tree: Any, numbers: bool) -> Iterator[int | None]:  # faster than sets of sets
    if isinstance(tree, Tensor):
        yield tree.shape[0] if tree.dim() else None
    elif is_array(tree):
        array = _as_array(tree)
        yield array.shape[0] if array.ndim else None
    elif (nodes := children(tree)) is not None:
        for node in nodes.values():
            yield from _row_counts(node, numbers)
    elif not (numbers and type(tree) in _NUMBERS):
        yield None


def row_count(tree: Any, *, numbers: bool = False) -> int | None:
    """Return the first dimension that all leaves of a tree share; None if there is none."""
    counts = row_counts(tree, numbers=numbers)
    return counts.pop() if len(counts) == 1 else None


def rows_of(calls: Sequence[tuple[Any, ...]], collation: Collation) -> Rows:
    """Return the rows of a batch; ValueError if there are more than the largest of `pad_to`."""
    if not collation.concat:
        return Rows(collation.padded(len(calls)), None)
    counts: list[Any] = [row_count(call, numbers=True) for call in calls]
    return Rows(collation.padded(sum(counts)), counts)


def with_rows(calls: Sequence[tuple[Any, ...]], rows: Rows) -> Sequence[tuple[Any, ...]]:
    """Return calls of so many rows: the padding is behind the others, a number is in each row."""
    total, counts = rows
    if counts is None:
        return [*calls, *[calls[-1]] * (total - len(calls))]
    trees = [_spread(call, count) for call, count in zip(calls, counts, strict=True)]
    if lacks := total - sum(counts):
        last = next((n for n in reversed(range(len(calls))) if counts[n]), 0)

        def repeated(tensor: Tensor) -> Tensor:
            shape = (lacks, *tensor.shape[1:])
            return tensor[-1:].expand(shape) if len(tensor) else tensor.new_zeros(shape)

        trees.append(map_tensors(repeated, trees[last]))
    return trees


def _spread(tree: Any, count: int) -> Any:
    """Return the tree with a tensor of `count` equal elements in place of each number."""
    if type(tree) in _NUMBERS:
        return torch.tensor(tree).expand(count)
    if isinstance(tree, Tensor):
        return tree
    if is_array(tree):
        return _as_tensor(tree)
    nodes = children(tree) or {}
    return rebuild(tree, {key: _spread(node, count) for key, node in nodes.items()})


class Collator:
    """Stacks tensors, or joins rows, on `device` by blocking copies; on None, where they are."""

    def __init__(self, device: Device = None, *, concat: bool = False) -> None:
        self._device = device
        self._concat = concat
        self._joined: Callable[..., Tensor] = torch.cat if concat else torch.stack

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors as one on the device."""
        return self.to_device(self._joined([*tensors]))

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device."""
        return tensor if self._device is None else tensor.to(self._device)


def collate(values: Sequence[Any], collator: Collator) -> Any:
    """Return one tree for many of one `collate_key`."""
    first = values[0]
    if isinstance(first, Tensor):
        return collator.join(values)
    if type(first) in _NUMBERS:
        return collator.to_device(torch.tensor([*values]))
    if is_array(first):
        return collator.join([*map(_as_tensor, values)])
    trees = [children(value) or {} for value in values]
    collated = {key: collate([tree[key] for tree in trees], collator) for key in trees[0]}
    return rebuild(first, collated)


def uncollate(tree: Any, size: int | None = None, counts: Sequence[int] | None = None) -> list[Any]:
    """Return the first `size` rows of a tree with a `row_count`, or all, without its dimension.

    With `counts`, return so many rows each, with their dimension. Tensors are on the CPU. No tensor
    and no array shares memory with the tree.
    """
    if isinstance(tree, Tensor):
        # One copy from the device; then one per row: a view would keep the whole batch alive, and
        # autograd forbids to change it in place.
        host = tree.cpu()
        parts = host.unbind(0)[:size] if counts is None else cut(host, counts)
        return [part.clone() for part in parts]
    if is_array(tree):
        array = _as_array(tree)
        if counts is not None:
            return [part.copy() for part in cut(array, counts)]
        rows = array[:size]
        return [row.copy() for row in rows] if array.ndim > 1 else [*rows]  # scalars own themselves
    nodes = {
        key: node for key, node in (children(tree) or {}).items() if row_count(node) is not None
    }
    columns = [uncollate(node, size, counts) for node in nodes.values()]
    return [rebuild(tree, dict(zip(nodes, row, strict=True))) for row in zip(*columns, strict=True)]


def cut(rows: Any, counts: Sequence[int]) -> list[Any]:
    """Return so many of the rows each, in order: slices of a list, a tensor or an array."""
    return [rows[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def is_array(value: Any) -> bool:
    """Return whether it is an array or a scalar of NumPy, or of a library that NumPy can read."""
    return hasattr(type(value), "__array__") and not isinstance(value, Tensor)


def _as_array(value: Any) -> Any:
    return import_module("numpy").asarray(value)


def _as_tensor(value: Any) -> Tensor:
    array = _as_array(value)
    if not array.flags.writeable:  # torch would warn
        array = array.copy()
    try:
        return torch.as_tensor(array)
    except ValueError:  # a negative stride
        return torch.as_tensor(array.copy())
