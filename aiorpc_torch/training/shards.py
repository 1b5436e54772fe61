"""Slices of tensors that several publishers have: which of them a follower needs, and of whom.

DTensors are known by their public attributes alone; the rest is arithmetic of boxes.
(tests/unit/training/test_shards.py)
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Box(NamedTuple):
    """A slice of a tensor: its first index in each dimension, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def meet(self, other: "Box") -> "Box":
        """Return what is in both; its size is 0 if nothing is."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = map(min, self._ends(), other._ends())
        return Box(
            starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True))
        )

    def hull(self, other: "Box") -> "Box":
        """Return the smallest box around both."""
        starts = tuple(map(min, self.offset, other.offset))
        ends = map(max, self._ends(), other._ends())
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def of(self, tensor: Tensor, start: Sequence[int]) -> Tensor:
        """Return this slice of a tensor whose first element has the index `start`."""
        for dim, (offset, size) in enumerate(zip(self.offset, self.shape, strict=True)):
            tensor = tensor.narrow(dim, offset - start[dim], size)
        return tensor

    def _ends(self) -> list[int]:
        return [start + size for start, size in zip(self.offset, self.shape, strict=True)]


def whole(shape: Iterable[int]) -> Box:
    """Return the box of a whole tensor."""
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


class Slice(NamedTuple):
    """A slice of a tensor, and the shape of the whole one."""

    box: Box
    shape: tuple[int, ...]


Wanted = Mapping[str, Box | None]
"""The slices that are wanted of the tensors named; None for nothing. Others are wanted whole."""

NOTHING: Wanted = {}
"""No wish for slices: all tensors are wanted whole."""


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor, or a parameter of one."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def local(tensor: Any) -> Tensor:
    """Return a tensor, or of a DTensor the shard that this process has."""
    found: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return found


def slice_of(tensor: Any) -> Slice:
    """Return the slice of a DTensor that this process has.

    As `torch.chunk` does, `Shard(dim)` on n processes gives each ceil(size / n) rows of `dim`, and
    the last ones what is left (torch.distributed.tensor, "Placement types").
    """
    mesh = tensor.device_mesh
    box = whole(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this process is not in the mesh
        return Slice(Box(box.offset, (0,) * len(box.shape)), box.shape)
    offset, shape = list(box.offset), list(box.shape)
    for index, placement in enumerate(tensor.placements):
        if type(placement).__name__ == "Shard":
            dim, count = placement.dim % len(shape), mesh.size(index)
            share = -(-shape[dim] // count)
            start = min(share * coordinate[index], shape[dim])
            offset[dim] += start
            shape[dim] = min(share, shape[dim] - start)
        elif not placement.is_replicate():
            raise TypeError(
                f"versions take DTensors of Shard and Replicate, got {placement}: call "
                "`redistribute()` first"
            )
    return Slice(Box(tuple(offset), tuple(shape)), box.shape)


def assign(
    publishers: Mapping[str, Mapping[str, Slice]], needed: Mapping[str, Box]
) -> dict[str, dict[str, Box | None]]:
    """Return what is wanted of each publisher, so that every slice comes from one of them.

    Slices are known by the tensor's name. Of tensors that are not in `needed` all is.
    """
    wanted: dict[str, dict[str, Box | None]] = {each: {} for each in publishers}
    shapes: dict[str, tuple[int, ...]] = {}
    taken: dict[str, list[Box]] = {}
    for publisher, slices in publishers.items():
        for name, (box, shape) in slices.items():
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(
                    f"publishers have different tensors under one name: {name} has the shape "
                    f"{shapes[name]} and, on {publisher!r}, {shape}"
                )
            target = needed.get(name, whole(shape))
            part = box.meet(target)
            before = taken.setdefault(name, [])
            if not target.size and not before:
                part = target  # an empty tensor, of the first one
            elif not part.size or part in before:
                wanted[publisher][name] = None
                continue
            before.append(part)
            if part != box:
                wanted[publisher][name] = part
    for name, parts in taken.items():
        if not is_covered(needed.get(name, whole(shapes[name])), parts):
            raise ValueError(
                f"{name} has parts that are not on {', '.join(map(repr, publishers))}: name all of "
                "its publishers, as in follow(name, on=[...])"
            )
    return wanted


def is_covered(box: Box, parts: Iterable[Box]) -> bool:
    """Return whether parts that do not overlap, or are equal, cover a box."""
    return sum(each.meet(box).size for each in {*parts}) >= box.size


def union(one: Wanted, other: Wanted) -> dict[str, Box | None]:
    """Return what is wanted by either."""
    found = dict[str, Box | None]()
    for name in one.keys() & other.keys():
        first, second = one[name], other[name]
        found[name] = first.hull(second) if first and second else first or second
    return found


def has_all(held: Wanted, wanted: Wanted) -> bool:
    """Return whether all that is wanted is among what is held."""
    return union(held, wanted) == held
