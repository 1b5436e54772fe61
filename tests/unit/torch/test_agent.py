"""The devices and maps that torch's agent is made with."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OWN = {"a": {"cuda:0": "cuda:0"}}


@pytest.fixture(scope="module")
def logs() -> dict[str, list[tuple[Any, ...]]]:
    """What was done to CUDA and to torch's agent in each scenario, in order."""
    line = [sys.executable, "-m", "tests.support.agent_devices"]
    root = Path(__file__).parents[3]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)  # type: ignore[no-any-return]


def test_the_agent_knows_every_device_before_a_message_can_arrive(logs: Any) -> None:
    """CUDA is initialized first. The maps of the worker's calls to itself are among them."""
    reverse = {**OWN, "b": {"cuda:0": "cuda:1"}}
    assert logs["with_maps"] == [("init",), ("agent", reverse, ["cuda:0"], OWN)]


def test_without_maps_cuda_is_not_touched(logs: Any) -> None:
    assert logs["without_maps"] == [("agent", {}, [], {}), ("join", "b", 77, [], {})]


def test_a_replacement_process_may_have_other_maps(logs: Any) -> None:
    """Those of the old process are forgotten, and the worker's own are kept.

    Its id stays in torch's table, whose threads may refer to the entry.
    """
    leave, *rest = logs["replaced"]
    assert leave == ("leave", "b", -1, ["cuda:0"], OWN)
    assert rest == [
        ("init",),
        ("join", "b", 78, ["cuda:0", "cuda:1"], {"b": {"cuda:1": "cuda:0"}}),
        ("routes", {"cuda:1": "cuda:0"}),
    ]
