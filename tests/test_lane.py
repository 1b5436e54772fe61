"""Whatever the order of arrival, what a worker sent comes out in the order in which it was sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorpc_torch._lane import FAR, Lane

counts = st.integers(0, 40)
arrivals = counts.flatmap(lambda count: st.permutations(range(count)))


@given(arrivals)
def test_any_order_of_arrival_gives_back_the_order_sent(arrivals: list[int]) -> None:
    """All come out, each once, in order of their numbers."""
    lane: Lane[int] = Lane()
    out = [item for seq in arrivals for item in lane.arrived(seq, 10 * seq)]
    assert out == [10 * seq for seq in range(len(arrivals))]


@given(arrivals)
def test_nothing_early_and_nothing_late(arrivals: list[int]) -> None:
    """At any time, what has come out is exactly the unbroken start of what has arrived."""
    lane: Lane[int] = Lane()
    here: set[int] = set()
    out: list[int] = []
    for seq in arrivals:
        here.add(seq)
        out += lane.arrived(seq, seq)
        unbroken = next(n for n in range(len(arrivals) + 1) if n not in here)
        assert out == list(range(unbroken))
        assert repr(lane) == f"<Lane at {unbroken}, {len(here) - unbroken} early>"


@given(arrivals)
def test_nothing_is_kept_of_what_came_out(arrivals: list[int]) -> None:
    """A lane that has given back all it got holds nothing, however much went through."""
    lane: Lane[int] = Lane()
    for seq in arrivals:
        lane.arrived(seq, seq)
    assert repr(lane) == f"<Lane at {len(arrivals)}, 0 early>"


@given(arrivals)
def test_what_an_item_is_does_not_matter(arrivals: list[int]) -> None:
    """None, equal and unhashable items travel as any others, and are not looked at."""
    lane: Lane[object] = Lane()
    items = [None, [], {}, 0, False][: len(arrivals)] * (len(arrivals) // 5 + 1)
    out = [item for seq in arrivals for item in lane.arrived(seq, items[seq])]
    assert all(a is b for a, b in zip(out, items, strict=False))
    assert len(out) == len(arrivals)


def test_in_order_there_is_no_delay() -> None:
    """An item that comes in its turn comes out at once."""
    lane: Lane[str] = Lane()
    assert [lane.arrived(n, item) for n, item in enumerate("abc")] == [["a"], ["b"], ["c"]]


@given(arrivals, st.integers(-3, 45))
def test_what_has_come_and_what_cannot_be_is_refused(arrivals: list[int], other: int) -> None:
    """It changes nothing: all the others come out as they would."""
    lane: Lane[int] = Lane()
    out: list[int] = []
    here: set[int] = set()
    for seq in arrivals:
        for number in (*here, other - 50, abs(other) + len(out) + FAR):
            assert not lane.expects(number)
            with pytest.raises(ValueError, match="cannot be"):
                lane.arrived(number, -1)
        assert lane.expects(seq)
        out += lane.arrived(seq, seq)
        here.add(seq)
    assert out == [*range(len(arrivals))]
