"""The order in which holders of versions are asked, whatever they answer."""

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch.training.recovery import Answer, in_order

answers = st.dictionaries(
    st.integers(0, 9), st.builds(Answer, st.booleans(), st.integers(-1, 5), st.booleans())
)


@pytest.mark.promise("training.recover")
@given(answers, st.sets(st.integers(0, 9)), st.dictionaries(st.integers(0, 9), st.integers(1, 3)))
def test_the_newest_that_answers(
    told: dict[int, Answer], lost: set[int], newer: dict[int, int]
) -> None:
    """As `recover` asks: some are lost as they answer, some have received a newer one since."""
    found = next((each for each in in_order(told) if each not in lost), None)
    living = [each for each in told if each not in lost and told[each].version >= 0]
    assert (found is None) == (not living)
    if found is not None:
        intact = [told[each].version for each in living if told[each].is_intact]
        assert told[found].is_intact == bool(intact)
        newest = max(intact or [told[each].version for each in living])
        assert told[found].version + newer.get(found, 0) >= newest
        near = [each for each in living if told[each] > told[found]]
        assert not near
