"""Slurm's lists of hosts, against an expander of their parts."""

import contextlib
import itertools

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._world.launch import expand_hosts

words = st.text("abz.-_09", min_size=1, max_size=4)
ranges = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4))  # first, more, width
brackets = st.lists(ranges, min_size=1, max_size=3)
hosts = st.lists(words | brackets, min_size=1, max_size=4)


def written(part: str | list[tuple[int, int, int]]) -> str:
    """The part of a name as Slurm writes it."""
    if isinstance(part, str):
        return part
    each = (
        f"{first:0{width}}-{first + more:0{width}}" if more else f"{first:0{width}}"
        for first, more, width in part
    )
    return f"[{','.join(each)}]"


def meant(part: str | list[tuple[int, int, int]]) -> list[str]:
    """The texts that the part stands for."""
    if isinstance(part, str):
        return [part]
    return [
        f"{number:0{width}}"
        for first, more, width in part
        for number in range(first, first + more + 1)
    ]


@given(st.lists(hosts, min_size=1, max_size=4))
def test_any_list(names: list[list[str | list[tuple[int, int, int]]]]) -> None:
    """Names of words and brackets in any order, with and without zeros in front."""
    text = ",".join("".join(map(written, parts)) for parts in names)
    expected = ["".join(each) for parts in names for each in itertools.product(*map(meant, parts))]
    found = itertools.islice(expand_hosts(text), 1000)
    assert [*found] == expected[:1000]


def test_the_lists_of_the_manual() -> None:
    """Padded ranges, single hosts, and several brackets."""
    assert [*expand_hosts("node[03-05,9],gpu1")] == ["node03", "node04", "node05", "node9", "gpu1"]
    assert [*expand_hosts("n[9-11]")] == ["n9", "n10", "n11"]
    assert [*expand_hosts("r[1-2]n[1-2]-ib")] == ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]


def test_a_range_is_read_as_far_as_it_is_needed() -> None:
    """Its length costs nothing."""
    assert next(expand_hosts("n[1-9999999999],m")) == "n1"


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a b", "a[", "a]", "a[]", "a[1", "a[b]", "a[3-1]", "a[1-]"),
        *("a[1,]", "a[1-2-3]", "a[1[2]]", "a[\N{ARABIC-INDIC DIGIT ONE}]"),
    ],
)
def test_what_is_no_list(text: str) -> None:
    """It is refused as a whole, before its first host is used."""
    with pytest.raises(ValueError, match="must be a list of hosts"):
        expand_hosts(text)


@given(st.text("a1[],- ", max_size=12))
def test_any_text(text: str) -> None:
    """It has a first host, or is refused."""
    with contextlib.suppress(ValueError):
        assert next(expand_hosts(text))
