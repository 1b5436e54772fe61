"""Warnings of slow steps: one a minute for each method."""

import pytest

from aiorpc_torch._aio import slow_steps
from aiorpc_torch._aio.slow_steps import SlowSteps


@pytest.mark.promise("worlds.slow_loop")
def test_one_warning_a_minute_for_each_method(caplog: pytest.LogCaptureFixture) -> None:
    """The next one tells how many were not logged."""
    steps = SlowSteps()
    steps.note("a", 0.25, 100.0)
    steps.note("a", 0.5, 101.0)
    steps.note("b", 0.25, 101.0)
    steps.note("a", 1.0, 159.9)
    assert [text.split()[0] for text in caplog.messages] == ["a", "b"]
    steps.note("a", 0.75, 160.0)
    assert caplog.messages[-1] == (
        "a held the event loop for 0.75 s: nothing else was served meanwhile. A plain `def` would "
        "run in a thread; 2 more steps of it, 1.50 s in all, were not logged"
    )
    steps.note("a", 0.25, 220.0)
    assert len(caplog.messages) == 4
    assert caplog.messages[-1].endswith("in a thread")


def test_methods_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that makes names without end keeps few of them."""
    monkeypatch.setattr(slow_steps, "MAX_NAMES", 2)
    steps = SlowSteps()
    for name in "abc":
        steps.note(name, 1.0, 0.0)
    assert len(steps._methods) == 1
    assert len(caplog.messages) == 3


def test_all_steps_are_counted() -> None:
    """Those that were logged, and those that were not."""
    steps = SlowSteps()
    for seconds in (0.2, 0.5, 0.3):
        steps.note("Policy.act", seconds, 7.0)
    steps.note("Policy.act", 0.1, 7.0 + slow_steps.INTERVAL)
    assert steps.counts() == {"Policy.act": (4, 0.5)}
