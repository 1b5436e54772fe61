"""The numbers of versions: they only grow, for each follower and across publishers."""

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch.training.versions import Versions


def test_the_first_version_and_those_after_it() -> None:
    versions = Versions("a")
    assert versions.newest == 0
    assert (versions.oldest, versions.all()) == (0, ["a"])
    assert [versions.add("b"), versions.add("c")] == [1, 2]
    assert (versions.newest, versions.get(2)) == (2, "c")
    assert (versions.oldest, versions.all()) == (1, ["b", "c"])


def test_as_many_are_kept_as_may_be() -> None:
    versions = Versions("a", keep=2)
    versions.add("b")
    assert versions.get(0) == "a"
    versions.add("c")
    assert versions.get(1) == "b"
    with pytest.raises(LookupError, match="version 0 is not kept; kept are 1, 2: raise keep="):
        versions.get(0)


@pytest.mark.parametrize("arguments", [(0, 0), (0, True - 2), (0, 1.5), (-1, 2), ("0", 2)])
def test_arguments_that_are_refused(arguments: tuple[object, object]) -> None:
    with pytest.raises(ValueError, match="must be a"):
        Versions("a", *arguments)  # type: ignore[arg-type]


def test_a_replacement_is_told_before_it_publishes() -> None:
    versions = Versions("first")
    assert not versions.see(57)
    assert versions.newest == 0  # nobody goes back to it
    assert versions.add("next") == 58


def test_a_replacement_is_told_after_it_has_published() -> None:
    versions = Versions("first")
    assert versions.add("next") == 1
    assert versions.see(57)
    assert (versions.newest, versions.get(58)) == (58, "next")
    assert not versions.see(57)
    assert not versions.see(58)
    assert versions.add("last") == 59


@given(
    keep=st.integers(1, 4),
    steps=st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 9)))),
)
def test_every_follower_sees_higher_numbers_only(
    keep: int, steps: list[tuple[int, int] | None]
) -> None:
    """None is a publication; (follower, more) a follower that looks, having seen `more` before."""
    versions, published, seen = Versions(0, keep=keep), 0, dict.fromkeys(range(4), -1)
    for step in steps:
        if step is None:
            published += 1
            number = versions.add(published)
            assert number > max(seen.values())
            assert versions.get(number) == published
            continue
        follower, more = step
        if published:
            seen[follower] += more
        versions.see(seen[follower])
        if versions.newest > seen[follower]:
            seen[follower] = versions.newest
            assert versions.get(versions.newest) == published
    assert versions.newest >= published
