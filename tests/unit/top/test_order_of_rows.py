"""The order of rows of `top`, and its quantiles of histograms."""

from collections import Counter

import pytest

from aiorpc_torch._server.timings import bucket_of
from aiorpc_torch._top.model import Row, quantile, sort_rows


def test_sorting() -> None:
    rows = [Row("1", "a", "b", 1, p99=0.1), Row("2", "a", "a", 0), Row("3", "a", "c", 2, p99=0.5)]
    assert [row.name for row in sort_rows(rows, "p")] == ["c", "b", "a"]
    assert [row.name for row in sort_rows(rows, "n")] == ["a", "b", "c"]
    assert [row.name for row in sort_rows(rows, "r")] == ["a", "b", "c"]


def test_quantiles() -> None:
    assert quantile(Counter({bucket_of(0.5): 1}), 0.99) == pytest.approx(0.5, rel=0.1)
    assert quantile({}, 0.5) is None
