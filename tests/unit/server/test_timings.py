"""Durations of served calls: none while they are off, buckets of 9 % while they are on."""

import time

from hypothesis import given, strategies as st

from aiorpc_torch._server.timings import SHORTEST, STEPS, Timings, bucket_of


@given(st.floats(SHORTEST, 1e5))
def test_a_bucket_is_exact_to_nine_percent(seconds: float) -> None:
    lower = SHORTEST * 2 ** (bucket_of(seconds) / STEPS)
    assert lower <= seconds * 1.001
    assert seconds < lower * 2 ** (1 / STEPS) * 1.001


def test_nothing_is_counted_while_they_are_off() -> None:
    timings = Timings()
    timings.record("step", time.monotonic()).end()
    assert timings.snapshot() == {}


def test_calls_are_counted_by_method() -> None:
    timings = Timings()
    timings.is_on = True
    for _ in range(3):
        timings.record("step", time.monotonic() - 1.0).end()
    assert sum(timings.snapshot()["step"].values()) == 3
    assert min(timings.snapshot()["step"]) >= bucket_of(1.0)
