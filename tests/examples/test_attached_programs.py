"""The tutorials' programs, unchanged, with every second call awaited beside `rpc_sync`."""

import re
import sys

import pytest

from tests.support.example_programs import PATIENCE, run, run_line

PLAIN = {
    "cartpole": ("--rounds", "3", "--steps", "100", "--seed", "5", "--observers", "2"),
    "reinforce": ("--quick", "--seed", "5", "--observers", "2"),
    "parameter_server": (
        *("--trainers", "2", "--model", "resnet18", "--side", "32"),
        *("--batch", "2", "--iterations", "4"),
    ),
}
RESULTS = ("reward", "loss", "accuracy", "greedy")


def results(said: str) -> list[str]:
    """The lines of what was learned."""
    return [line for line in said.splitlines() if line.startswith(RESULTS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "cartpole",
        pytest.param("reinforce", marks=pytest.mark.exhaustive),
        pytest.param("parameter_server", marks=pytest.mark.exhaustive),
    ],
)
def test_it_learns_the_same(program: str) -> None:
    """Batched answers of `async_execution` and calls of functions, by `await` and by `rpc_sync`."""
    line = [sys.executable, "-m", "tests.support.attached_programs", program]
    attached = run_line(line, PATIENCE)
    assert results(attached)
    assert results(attached) == results(run(f"_reference.{program}", *PLAIN[program], python=()))
    awaited = [int(each) for each in re.findall(r"has awaited (\d+) calls", attached)]
    assert sum(count > 0 for count in awaited) >= 2
