"""Slices of tensors: what each publisher sends covers what is needed, and nothing comes twice."""

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from aiorpc_torch.training.shards import (
    Box,
    Slice,
    assign,
    has_all,
    is_covered,
    slice_of,
    union,
    whole,
)

sizes = st.integers(0, 7)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, size)) for size in shape]
    ends = [draw(st.integers(start, size)) for start, size in zip(starts, shape, strict=True)]
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(tuple(starts), lengths)


def cells(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(start, start + size) for start, size in zip(*box, strict=True)]
    return {*itertools.product(*ranges)}


class Mesh:
    """The public attributes of a DeviceMesh that are used."""

    def __init__(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
        self._shape, self._coordinate = shape, coordinate

    def size(self, dim: int) -> int:
        return self._shape[dim]

    def get_coordinate(self) -> list[int]:
        return [*self._coordinate]


class Sharded:
    """The public attributes of a DTensor that are used."""

    def __init__(self, shape: tuple[int, ...], mesh: Mesh, placements: list[object]) -> None:
        self.shape, self.device_mesh, self.placements = shape, mesh, placements


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, int], list[dict[str, Slice]]]:
    """Return the shape of a tensor, and its slices on the processes of a mesh of two dimensions."""
    from torch.distributed.tensor import Replicate, Shard

    shape = draw(st.tuples(sizes, sizes))
    mesh = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    kinds = st.sampled_from([Shard(0), Shard(1), Shard(-1), Replicate()])
    placements = [draw(kinds), draw(kinds)]
    coordinates = itertools.product(*map(range, mesh))
    tensors = [Sharded(shape, Mesh(mesh, each), placements) for each in coordinates]
    return shape, [{"w": slice_of(each)} for each in tensors]


@given(st.data())
def test_boxes_are_sets_of_indices(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(sizes, sizes))
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    assert cells(one.meet(other)) == cells(one) & cells(other)
    assert len(cells(one)) == one.size
    assert cells(one.hull(other)) >= cells(one) | cells(other)
    tensor = torch.arange(shape[0] * shape[1]).reshape(shape)
    found = one.of(tensor, (0, 0))
    assert {*found.flatten().tolist()} == {int(tensor[index]) for index in cells(one)}


@pytest.mark.promise("training.shards")
@given(st.data(), meshes())
def test_what_is_needed_comes_once(
    data: st.DataObject, mesh: tuple[tuple[int, int], list[dict[str, Slice]]]
) -> None:
    shape, layouts = mesh
    publishers = {f"trainer{number}": each for number, each in enumerate(layouts)}
    needed = data.draw(st.none() | boxes(shape))
    target = whole(shape) if needed is None else needed
    wanted = assign(publishers, {} if needed is None else {"w": needed})
    sent = list[tuple[int, ...]]()
    for name, layout in publishers.items():
        box = layout["w"].box
        asked = wanted[name].get("w", box)
        sent += [] if asked is None else sorted(cells(asked.meet(box)))
    assert {*sent} == cells(target)
    assert len(sent) == target.size


@pytest.mark.promise("training.shards")
def test_what_no_publisher_has() -> None:
    half = {"w": Slice(Box((0, 0), (2, 4)), (4, 4))}
    text = r"w has parts that are not on 'a': name all of its publishers, as in follow\(name, on="
    with pytest.raises(ValueError, match=text):
        assign({"a": half}, {})
    assert assign({"a": half}, {"w": Box((0, 1), (2, 2))}) == {"a": {"w": Box((0, 1), (2, 2))}}
    other = {"w": Slice(Box((0,), (2,)), (2,))}
    with pytest.raises(ValueError, match=r"shape \(4, 4\) and, on 'b', \(2,\)"):
        assign({"a": half, "b": other}, {})
    assert not is_covered(Box((0,), (3,)), [Box((0,), (1,)), Box((2,), (1,))])


@given(st.data())
def test_wishes_of_several(data: st.DataObject) -> None:
    shape = (4, 4)
    wishes = st.dictionaries(st.sampled_from("ab"), st.none() | boxes(shape))
    one, other = data.draw(wishes), data.draw(wishes)
    both = union(one, other)
    assert has_all(both, one)
    assert has_all(both, other)
    for name in "ab":
        parts = [
            cells(whole(shape)) if name not in each else cells(each[name] or Box((0, 0), (0, 0)))
            for each in (one, other)
        ]
        found = (
            cells(whole(shape)) if name not in both else cells(both[name] or Box((0, 0), (0, 0)))
        )
        assert found >= parts[0] | parts[1]
    assert has_all({}, one)
