"""The ratio of samples to inserts: it holds within its slack, and never stops both sides."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch.training.ratio import SampleLimit


def test_the_first_sample_waits_for_enough_inserts() -> None:
    limit = SampleLimit(2, min_size=3, slack=4)
    for _ in range(3):
        assert not limit.may_sample(1)
        assert limit.may_insert()
        limit.insert()
    assert limit.may_sample(4)
    assert not limit.may_sample(5)


def test_inserts_and_samples_wait_for_each_other() -> None:
    limit = SampleLimit(2, min_size=1, slack=4)
    for _ in range(3):
        assert limit.may_insert()
        limit.insert()
    assert limit.lead == -4
    assert not limit.may_insert()
    limit.sample(2)
    assert limit.may_insert()
    limit.sample(6)
    assert limit.lead == 4
    assert not limit.may_sample(1)
    limit.insert()
    assert limit.may_sample(2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1, 1), "samples_per_insert must be positive, got 0"),
        ((None, 1, 1), "samples_per_insert must be positive, got None"),
        ((1, "2", 1), "min_size must be at least 1, got '2'"),
        ((1, 1, None), "slack must be a number of items from 0 on, got None"),
        ((1, 0, 1), "min_size must be at least 1, got 0"),
        ((8, 1, -1), "slack must be a number of items from 0 on, got -1"),
    ],
)
def test_arguments_that_are_refused(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SampleLimit(*arguments)


def test_a_sample_that_is_too_large_for_the_slack_goes_when_no_insert_may() -> None:
    limit = SampleLimit(8, min_size=1, slack=10)
    limit.insert()
    assert not limit.may_sample(64)
    limit.insert()
    assert not limit.may_insert()
    assert limit.may_sample(64)
    limit.sample(64)
    assert not limit.may_sample(1)


@given(
    ratio=st.sampled_from([0.25, 0.5, 1, 3, 8]),
    min_size=st.integers(1, 5),
    slack=st.sampled_from([0, 1, 2, 4.5, 20]),
    size=st.integers(1, 16),
    choices=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_the_ratio_holds_and_one_side_may_always_go_on(
    ratio: float, min_size: int, slack: float, size: int, choices: list[bool]
) -> None:
    bound = max(slack, ratio + size - slack)
    limit, inserted, sampled = SampleLimit(ratio, min_size, slack), 0, 0
    for wants_insert in choices:
        assert limit.may_insert() or limit.may_sample(size)
        if limit.may_insert() and (wants_insert or not limit.may_sample(size)):
            limit.insert()
            inserted += 1
        else:
            limit.sample(size)
            sampled += size
        if inserted >= min_size:
            assert abs(sampled - ratio * (inserted - min_size)) <= bound
        else:
            assert sampled == 0
