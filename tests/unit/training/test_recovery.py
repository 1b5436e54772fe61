"""The order in which holders of versions are asked, whatever they answer."""

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch.training.recovery import Answer, Candidates

answers = st.dictionaries(
    st.integers(0, 9), st.builds(Answer, st.integers(-1, 5), st.booleans()), max_size=10
)


@pytest.mark.promise("training.recover")
@given(answers, st.sets(st.integers(0, 9)), st.dictionaries(st.integers(0, 9), st.integers(1, 3)))
def test_the_newest_that_answers(
    told: dict[int, Answer], lost: set[int], newer: dict[int, int]
) -> None:
    """As `recover` asks: some are lost as they answer, some have received a newer one since."""
    candidates, best, asked = Candidates(told), -1, list[int]()
    while (holder := candidates.next(best)) is not None:
        asked.append(holder)
        if holder not in lost:
            best = max(best, told[holder].version + newer.get(holder, 0))
    assert best >= max((told[each].version for each in told if each not in lost), default=-1)
    assert asked == sorted(asked, key=told.__getitem__, reverse=True)
    assert len({*asked}) == len(asked)
    found = [each for each in asked if each not in lost]
    assert len(found) == (best >= 0) or not newer  # no version travels in vain
    assert all(told[each].version >= 0 for each in asked)


def test_the_nearest_of_equal_ones() -> None:
    candidates = Candidates({"far": Answer(3, False), "near": Answer(3, True)})
    assert candidates.next(-1) == "near"
    assert candidates.next(3) is None
    assert candidates.next(2) == "far"
