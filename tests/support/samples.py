"""Samples of large matrices: `make test-rest` runs some diagonals, `make test-long` the rest.

A diagonal has each value of each axis, so what is lost is only some of their combinations.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def mark(*positions: int, of: int) -> pytest.MarkDecorator:
    """Return the mark of a cell: one in `of` is slow, and the others are exhaustive."""
    return pytest.mark.exhaustive if sum(positions) % of else pytest.mark.slow


def cells(*axes: Sequence[Any], of: int) -> list[Any]:
    """Return all combinations of the axes, each with its mark, for `parametrize`."""
    return [
        pytest.param(*(value for _, value in cell), marks=mark(*(n for n, _ in cell), of=of))
        for cell in product(*map(enumerate, axes))
    ]
