"""Versions of several publishers: cut to what is wanted of each, and joined to one tree.

(tests/integration/test_sharded_weights.py)
"""

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .shards import Box, Slice, Wanted, is_covered, whole
from .snapshots import (
    Block,
    Loaded,
    Memory,
    Part,
    Parts,
    Place,
    Snapshot,
    checksum,
    place_of,
    sample_of,
)


class Cuts:
    """Snapshots of one publisher with only what is wanted of them. Each block is cut once."""

    def __init__(self) -> None:
        self._memory = Memory()
        self._made: dict[tuple[str, Any], tuple[Block, dict[Place, Place | None]]] = {}

    def cut(self, snapshot: Snapshot, wanted: Wanted) -> Snapshot:
        """Return a snapshot in which blocks with other tensors than those wanted are cut."""
        boxes, blocks = _boxes(snapshot, wanted), dict(snapshot.blocks)
        moved = dict[Place, Place | None]()
        for name in {each.block for i, each in enumerate(snapshot.places) if each and i in boxes}:
            key = name, frozenset(wanted.items())
            if key not in self._made:
                self._made[key] = self._cut(snapshot, name, boxes)
            block, places = self._made[key]
            moved |= places
            del blocks[name]
            blocks[block.name] = block.written
        new = [each and moved.get(each._replace(checksum=None), each) for each in snapshot.places]
        return Snapshot(snapshot.tree, tuple(new), blocks, sample_of(new, blocks))

    def forget(self, kept: Collection[str]) -> None:
        """Forget what was cut of other blocks than these."""
        self._made = {key: each for key, each in self._made.items() if key[0] in kept}

    def _cut(
        self, snapshot: Snapshot, name: str, boxes: Mapping[int, Box | None]
    ) -> tuple[Block, dict[Place, Place | None]]:
        """Return a block of what is wanted of another one, and where its tensors are then."""
        block = Block(self._memory, len(snapshot.blocks[name]))
        moved = dict[Place, Place | None]()
        for index, place in enumerate(snapshot.places):
            if place is None or place.block != name:
                continue
            part, key = place.part, place._replace(checksum=None)
            box = boxes.get(index, part.box)
            if box is None or (box.size and not part.box.meet(box).size):
                moved[key] = None
                continue
            tensor = place.view(snapshot.blocks)
            if box.size:
                box = part.box.meet(box)
                tensor = box.of(tensor, part.box.offset)
            else:  # an empty tensor, which is sent as one
                tensor = tensor.new_empty(box.shape)
            added = block.add(place_of(tensor, Slice(box, part.shape)), tensor)
            data = added.bytes_in({block.name: block.written})
            moved[key] = added._replace(checksum=checksum(data))
        return block, moved


def _boxes(snapshot: Snapshot, wanted: Wanted) -> dict[int, Box | None]:
    """Return what is wanted of each tensor of which not all is, by the index of its place.

    A tensor of several names is wanted as far as under any of them.
    """
    found, here = dict[int, Box | None](), dict[int, Box]()
    for name, index, place in snapshot.names():
        here[index] = place.part.box
        box, other = wanted.get(name, here[index]), found.get(index)
        found[index] = box.hull(other) if box and other else box or other
    return {i: box for i, box in found.items() if not box or here[i].meet(box) != here[i]}


class PartsLackingError(ValueError):
    """The publishers' parts of a tensor do not cover what is needed of it."""


def merge(trees: Sequence[Loaded], needed: Mapping[str, Box]) -> Any:
    """Return one tree of those of several publishers, with the `Parts` of each tensor in it.

    Mappings are joined, lists and tuples of one length and dataclasses too. Of other values, the
    first publisher's counts. `needed` has slices by names; other tensors are needed whole.
    """
    parts = {key: part for _, found in trees for key, part in found.items()}
    return _merge([tree for tree, _ in trees], parts, needed, "")


# A function of the module: one inside `merge` that calls itself would be garbage of a cycle, and
# keep what was received until it is collected. (tests/unit/training/test_joining.py)
def _merge(
    trees: Sequence[Any], parts: Mapping[int, Part], needed: Mapping[str, Box], name: str
) -> Any:
    first = trees[0]
    if id(first) in parts:
        return _merge_parts([parts[id(each)] for each in trees if id(each) in parts], needed, name)
    if isinstance(first, Mapping):
        joined: Any = copy.copy(first)  # with what a state dict has besides
        alike = [each for each in trees if isinstance(each, Mapping)]
        for key in dict.fromkeys(key for each in alike for key in each):
            values = [each[key] for each in alike if key in each]
            joined[key] = _merge(values, parts, needed, f"{name}[{key!r}]")
        return joined
    alike = [each for each in trees if type(each) is type(first)]
    if type(first) in (list, tuple) or hasattr(first, "_fields"):
        columns = enumerate(zip(*(each for each in alike if len(each) == len(first)), strict=True))
        items = [_merge(column, parts, needed, f"{name}[{index}]") for index, column in columns]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        joined = copy.copy(first)
        for field in (each.name for each in dataclasses.fields(first)):
            if values := [getattr(each, field) for each in alike if hasattr(each, field)]:
                value = _merge(values, parts, needed, f"{name}.{field}")
                object.__setattr__(joined, field, value)
        return joined
    return first


def _merge_parts(found: Sequence[Part], needed: Mapping[str, Box], name: str) -> Parts:
    here = [(each.place, each.tensor) for each in found if each.place is not None]
    name = name or "the tree"
    places = {place.part.box: (place, tensor) for place, tensor in reversed(here)}
    shapes = {place.part.shape for place, _ in here}
    box = needed.get(name, whole(here[0][0].part.shape)) if here else None
    sizes = {box.size for box in places}
    if box is not None and len(sizes - {0}) > 1 and box.size in sizes and not needed.get(name):
        raise ValueError(
            f"{name} is whole on one publisher, and a shard of a DTensor on another: publish "
            "`model.state_dict()` on all of them, or whole tensors"
        )
    if box is None or len(shapes) > 1 or not is_covered(box, places):
        raise PartsLackingError(
            f"{name} has parts that are not on the publishers that are followed, or different "
            "shapes there: name all of its publishers, as in follow(name, on=[...])"
        )
    return Parts([*places.values()], box)
