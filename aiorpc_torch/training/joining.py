"""Versions of several publishers: cut to what is wanted of each, and joined to one tree.

(tests/unit/training/test_joining.py)
"""

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .shards import Box, Slice, Wanted, whole
from .snapshots import ABSENT, Block, Memory, Part, Parts, Place, Snapshot, checksum, place_of


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
        return Snapshot(snapshot.tree, tuple(new), blocks)

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
            if place is not None and place.block == name:
                box = boxes.get(index, place.part.box)
                moved[place._replace(checksum=None)] = _cut_one(snapshot, place, box, block)
        return block, moved


def _cut_one(snapshot: Snapshot, place: Place, box: Box | None, block: Block) -> Place | None:
    part = place.part
    box = box and part.box.meet(box)
    if box is None or not box.size:
        return None
    tensor = box.of(place.view(snapshot.blocks), part.box.offset)
    added = block.add(place_of(tensor, Slice(box, part.shape)), tensor)
    return added._replace(checksum=checksum(added.bytes_in({block.name: block.written})))


def _boxes(snapshot: Snapshot, wanted: Wanted) -> dict[int, Box | None]:
    """Return what is wanted of each tensor of which not all is, by the index of its place.

    A tensor of several names is wanted as far as under any of them.
    """
    found = dict[int, Box | None]()
    for name, index in snapshot.names():
        place = snapshot.places[index]
        if place is not None:
            box, other = wanted.get(name, place.part.box), found.get(index)
            found[index] = box.hull(other) if box and other else box or other
    parts = {index: snapshot.places[index].part.box for index in found}  # type: ignore[union-attr]
    return {
        each: box for each, box in found.items() if not box or parts[each].meet(box) != parts[each]
    }


def merge(trees: Sequence[Any], needed: Mapping[str, Box], name: str = "") -> Any:
    """Return one tree of those of several publishers, with the `Parts` of each tensor in it.

    Mappings are joined, sequences of one length and dataclasses too. Of other values, the first
    publisher's counts.

    Args:
        trees: the trees, as from `Snapshot.parts`.
        needed: the slice that is needed of a tensor, by its name; others are needed whole.
        name: name of the place of these trees in a larger one.
    """
    found = [each for each in trees if each is not ABSENT]
    if not found:
        return None  # nothing is needed of this tensor
    first = found[0]
    if isinstance(first, Part):
        parts = {each.slice.box: each for each in found if isinstance(each, Part)}
        box = needed.get(name or "the tree", whole(first.slice.shape))
        return Parts([*parts.values()], box)
    alike = [each for each in found if _has_form(each, first)]
    if isinstance(first, Mapping):
        return _merge_mappings(alike, needed, name)
    if isinstance(first, list | tuple):
        columns = enumerate(zip(*alike, strict=True))
        items = [merge(column, needed, f"{name}[{index}]") for index, column in columns]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = [field.name for field in dataclasses.fields(first) if field.init]
        values = {each: [getattr(tree, each) for tree in alike] for each in fields}
        merged = {each: merge(values[each], needed, f"{name}.{each}") for each in fields}
        return dataclasses.replace(first, **merged)
    return first


def _has_form(tree: Any, first: Any) -> bool:
    """Return whether the items of two trees belong together."""
    if isinstance(first, Mapping):
        return isinstance(tree, Mapping)
    is_sequence = isinstance(first, list | tuple)
    return type(tree) is type(first) and (not is_sequence or len(tree) == len(first))


def _merge_mappings(trees: Sequence[Any], needed: Mapping[str, Box], name: str) -> Any:
    merged = copy.copy(trees[0])  # with what a state dict has besides
    for key in dict.fromkeys(key for each in trees for key in each):
        values = [each[key] for each in trees if key in each]
        merged[key] = merge(values, needed, f"{name}[{key!r}]")
    return merged
