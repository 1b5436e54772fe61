"""Numbers in five characters."""

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._top.format import number, seconds, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "-"), (0.0, "0µs"), (12e-6, "12µs"), (0.0012, "1.2ms"), (0.0999, "100ms")),
        *((1.0, "1s"), (3.42, "3.4s"), (59.0, "59s"), (125.0, "125s"), (1500.0, "25m")),
        (7200.0, "2h"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (3.44, "3.4"),
        (312, "312"),
        (1234, "1.2k"),
        (45e6, "45M"),
        (2e9, "2G"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_sizes() -> None:
    assert (size(0), size(15 << 20)) == ("-", "16M")


@given(st.floats(0, 1e6))
def test_all_fit_into_their_columns(value: float) -> None:
    assert len(seconds(value)) <= 5
    assert len(number(value)) <= 4
