"""Nests of tensors: many of one kind stacked into one, and one split into its rows.

A nest is a tensor, an array, a number, or a dict, tuple, list or dataclass of nests. Knows values,
and neither batches nor calls.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_NUMBERS = (bool, int, float, complex)

Device = torch.device | str | None


def kind_of(value: Any) -> Hashable:
    """What nests must have in common to be stacked: structure, dtypes, shapes, `requires_grad`.

    Raises:
        TypeError: if there is something in it that cannot be stacked.
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
    parts = _parts(value)
    if parts is None:
        raise TypeError(f"a {type(value).__name__} cannot be stacked")
    return type(value), tuple(parts), tuple(kind_of(part) for part in parts.values())


class Where(Protocol):
    """Where stacked tensors are put."""

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor of many."""
        ...

    def put(self, tensor: Tensor) -> Tensor:
        """That tensor, there."""
        ...


class Here:
    """On a device, or where they are, by copies that are waited for."""

    def __init__(self, device: Device = None) -> None:
        self._device = device

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """As torch."""
        return self.put(torch.stack([*tensors]))

    def put(self, tensor: Tensor) -> Tensor:
        """As torch."""
        return tensor if self._device is None else tensor.to(self._device)


def stack(values: Sequence[Any], where: Where) -> Any:
    """One nest for many of one kind, each tensor in it one dimension more, which is the first."""
    first = values[0]
    if isinstance(first, Tensor):
        return where.stack(values)
    if type(first) in _NUMBERS:
        return where.put(torch.tensor([*values]))
    if hasattr(first, "__array__"):
        return where.stack([*map(_as_tensor, values)])
    every = [_parts(value) or {} for value in values]
    columns = {name: stack([each[name] for each in every], where) for name in every[0]}
    return _rebuild(first, columns)


def mapped(change: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """The nest with each of its tensors changed; what is none, as it is."""
    if isinstance(nest, Tensor):
        return change(nest)
    parts = _parts(nest)
    if not parts:
        return nest
    return _rebuild(nest, {name: mapped(change, part) for name, part in parts.items()})


def rows_of(nest: Any) -> list[Any] | None:
    """Its rows along the first dimension, each with tensors of its own, on the CPU.

    None if it is no nest of tensors that have the same first dimension.
    """
    if isinstance(nest, Tensor):
        # One copy from a device for all; then a copy of each row, which shall not drag them all
        # along, nor be a view, which autograd forbids to change in place.
        return [row.clone() for row in nest.cpu().unbind(0)] if nest.dim() else None
    parts = {name: part for name, part in (_parts(nest) or {}).items() if _parts(part) != {}}
    columns = {name: rows_of(part) for name, part in parts.items()}
    lengths = {None if rows is None else len(rows) for rows in columns.values()}
    if len(lengths) != 1 or None in lengths:
        return None
    rows = zip(*(rows or () for rows in columns.values()), strict=True)
    return [_rebuild(nest, dict(zip(columns, row, strict=True))) for row in rows]


def is_structure(value: Any) -> bool:
    """Whether it has parts: a dict, a tuple, a list or a dataclass."""
    return _parts(value) is not None


def _as_tensor(array: Any) -> Tensor:
    flags = getattr(array, "flags", None)
    if flags is not None and not flags.writeable:  # of which torch warns
        array = array.copy()
    try:
        return torch.as_tensor(array)
    except ValueError:  # a view that goes backwards
        return torch.as_tensor(array.copy())


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _rebuild(like: Any, parts: dict[Any, Any]) -> Any:
    """A value as `like`, with these parts in place of its own of these names."""
    if isinstance(like, tuple | list):
        make: Callable[..., Any] = getattr(like, "_make", type(like))  # of a named tuple
        return make(parts.get(index, part) for index, part in enumerate(like))
    made = copy.copy(like)  # nobody's `__init__` or `__post_init__` runs on columns
    if isinstance(made, dict):
        made.update(parts)
    else:
        for name, part in parts.items():
            object.__setattr__(made, name, part)  # it may be frozen
    return made
