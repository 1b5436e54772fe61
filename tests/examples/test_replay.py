"""DQN with actors that lag: it learns, in turns and at the same time."""

import argparse
import re
from collections.abc import Callable

import pytest

pytest.importorskip("gymnasium")

from examples import impala, replay
from tests.support.example_programs import run


@pytest.mark.parametrize("parse", [impala.parse, replay.parse])
def test_quick_is_fewer_steps(parse: Callable[..., argparse.Namespace]) -> None:
    assert 0 < parse("--quick").steps < parse("--seed", "0").steps / 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param(["--synchronous"], marks=pytest.mark.exhaustive), ["--staleness", "2"]],
)
def test_it_learns(options: list[str]) -> None:
    """Twice what it begins with, and more than random actions reach."""
    lines = run("replay", *options, "--steps", "2500").splitlines()
    results = [int(found[1]) for line in lines if (found := re.search(r"episodes (\d+)", line))]
    assert len(results) == 10
    assert results[-1] > 2 * results[0]
    assert results[-1] > 60
    assert re.fullmatch(r"greedy policy: \d+ on average", lines[-1])
