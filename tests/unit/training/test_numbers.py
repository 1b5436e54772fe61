"""Numbers that arguments may be."""

import numpy as np
import pytest

from aiorpc_torch.training.numbers import is_count, is_number


@pytest.mark.parametrize("value", [0, 3, np.int64(0)])
def test_whole_numbers(value: object) -> None:
    assert is_count(value)
    assert is_number(value)
    assert not is_count(value, 4)


@pytest.mark.parametrize("value", [None, "1", True, [1]])
def test_what_is_no_number(value: object) -> None:
    assert not is_count(value)
    assert not is_number(value)


def test_other_numbers() -> None:
    assert is_number(np.float32(1.5))
    assert not is_count(1.5)
    assert not is_count(-1)
