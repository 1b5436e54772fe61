"""The sample of a matrix: one cell in so many, with each value of each axis."""

import pytest

from tests.support.samples import cells


@pytest.mark.parametrize(
    ("sizes", "of"), [((2,), 2), ((2, 2), 2), ((4, 2), 2), ((4, 3), 2), ((3, 2, 3), 3)]
)
def test_each_value_is_in_the_sample(sizes: tuple[int, ...], of: int) -> None:
    """The other cells are there, with the other mark."""
    found = cells(*map(range, sizes), of=of)
    marks = [[mark.name for mark in cell.marks] for cell in found]
    sample = [cell.values for cell, names in zip(found, marks, strict=True) if names == ["slow"]]
    assert len(sample) * of == len(found)
    assert marks.count(["exhaustive"]) == len(found) - len(sample)
    if len(sizes) > 1:
        assert [len({*column}) for column in zip(*sample, strict=True)] == [*sizes]
