"""The names of processes that are gone."""

import pytest

from aiorpc_torch._torch.rrefs import past_name, split_past_name


@pytest.mark.parametrize("name", ["a", "a:was:3", "x" * 117])
def test_a_past_name_is_split(name: str) -> None:
    assert split_past_name(past_name(name, 32_767)) == (name, 32_767)


@pytest.mark.parametrize("name", ["a", "a:was:", ":was:3", "a:was:b", "was:3"])
def test_no_past_name(name: str) -> None:
    assert split_past_name(name) == (name, -1)


def test_torch_allows_a_past_name() -> None:
    assert len(past_name("x" * 128, 32_767)) <= 128
