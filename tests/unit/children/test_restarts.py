"""The restarts of children: their number is bounded, and their pauses grow."""

from hypothesis import given, strategies as st

from aiorpc_torch._children.supervisor import FIRST_PAUSE, LONGEST_PAUSE, STABLE, Restarts

Ends = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 1.0, STABLE, 60.0])))


@given(left=st.integers(0, 30), ends=Ends)
def test_no_more_restarts_than_were_given(left: int, ends: list[tuple[str, float]]) -> None:
    """For all workers together, whatever their pauses."""
    restarts = Restarts(left)
    pauses = [restarts.take(name, lived) for name, lived in ends]
    assert [pause is not None for pause in pauses] == [n < left for n in range(len(ends))]


@given(ends=Ends)
def test_the_pauses_of_a_worker(ends: list[tuple[str, float]]) -> None:
    """They double while its processes end early, up to half a minute, each worker on its own."""
    restarts, in_a_row = Restarts(len(ends)), {"a": 0, "b": 0}
    for name, lived in ends:
        count = 0 if lived >= STABLE else in_a_row[name]
        expected = 0.0 if count == 0 else min(FIRST_PAUSE * 2 ** (count - 1), LONGEST_PAUSE)
        assert restarts.take(name, lived) == expected
        in_a_row[name] = count + 1


def test_a_failure_without_end() -> None:
    """A thousand failures in a row take hours, and overflow nothing."""
    restarts = Restarts(1100)
    assert sum(restarts.take("a", 0.0) or 0.0 for _ in range(1100)) > 1000 * LONGEST_PAUSE
