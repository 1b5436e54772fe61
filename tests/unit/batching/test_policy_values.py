"""The values of `Fill` and `Round`: what is refused, and what they show."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from aiorpc_torch import Fill, Round

Policy = Fill | Round


@pytest.mark.parametrize("make", [Fill, Round])
@pytest.mark.parametrize("count", [True, False, 1.0, 2.5, "2", None, math.inf, math.nan])
def test_a_size_is_an_int(make: Callable[[object], Policy], count: object) -> None:
    """Nor is a bool one, though Python says so; the message names the parameter and the value."""
    name = "max_size" if make is Fill else "size"
    with pytest.raises(TypeError, match=f"^{name} must be an int, got {count!r}"):
        make(count)


@pytest.mark.parametrize("make", [Fill, Round])
@pytest.mark.parametrize("count", [0, -1, -(2**70)])
def test_a_size_is_at_least_one(make: Callable[[object], Policy], count: int) -> None:
    """An empty batch is none."""
    with pytest.raises(ValueError, match=rf"size must be at least 1, got {count}$"):
        make(count)


@pytest.mark.parametrize("wait", [-1.0, -5e-324, math.inf, -math.inf, math.nan])
def test_a_wait_is_finite_and_not_negative(wait: float) -> None:
    """An infinite wait would be a queue that never leaves; nan compares false with everything."""
    with pytest.raises(ValueError, match="max_wait must be seconds, at least 0 and finite"):
        Fill(2, wait)


@pytest.mark.parametrize("wait", [0, 0.0, -0.0, 5e-324, 1, 1e308])
def test_any_other_wait_will_do(wait: float) -> None:
    """Ints too; minus zero is zero."""
    assert Fill(2, wait).max_wait == wait


def test_policies_are_values() -> None:
    """Equal, hashable and unchangeable: one may serve many functions."""
    assert Fill(2, 0.5) == Fill(max_size=2, max_wait=0.5)
    assert {Round(3): "x"}[Round(3)] == "x"
    with pytest.raises(AttributeError):
        Fill(2).max_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (Fill, {"max_concurrent_batches": 0}, "max_concurrent_batches must be at least 1, got 0"),
        (Fill, {"max_concurrent_batches": True}, "max_concurrent_batches must be an int, got True"),
        (Fill, {"max_pending": 0}, "max_pending must be at least 1, got 0"),
        (Fill, {"key": "id"}, "key must be a function of a call's arguments, got 'id'"),
        (Fill, {"weight": 3, "max_weight": 3}, "weight must be a function of a call's arguments"),
        (Fill, {"weight": len}, "weight= requires max_weight="),
        (Fill, {"max_weight": 0}, "max_weight must be above 0 and finite, got 0"),
        (Fill, {"max_weight": math.inf}, "max_weight must be above 0 and finite, got inf"),
        (Fill, {"max_weight": math.nan}, "max_weight must be above 0 and finite, got nan"),
        (Round, {"quorum": 3, "timeout": 1.0}, "quorum must be at most size, 2, got 3"),
        (Round, {"quorum": 0, "timeout": 1.0}, "quorum must be at least 1, got 0"),
        (Round, {"quorum": 1}, "quorum= requires timeout="),
        (Round, {"timeout": math.inf}, "timeout must be seconds, at least 0 and finite, got inf"),
        (Round, {"member": "me"}, "member must be a function of a call's arguments, got 'me'"),
    ],
)
def test_a_policy_that_contradicts_itself_says_so(
    make: Callable[..., Policy], given: dict[str, Any], message: str
) -> None:
    """At once, where it is written, with the parameter and the value."""
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make(2, **given)


def test_a_policy_shows_what_was_given() -> None:
    """And nothing that is as it is by default."""
    assert repr(Fill(2, max_pending=3)) == "Fill(max_size=2, max_pending=3)"
    assert repr(Round(3, 2, 1.0)) == "Round(size=3, quorum=2, timeout=1.0)"
