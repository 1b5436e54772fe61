"""The tests of the order under a tool of compute-sanitizer: `python -m tests.gpu --sanitize`.

AIORPC_TEST_TOOL names the tool. Each test runs in a process of its own, several at once: the tools
make them many times slower, and most of them wait.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.gpu import test_stream_order
from tests.support.at_once import runs_at_once
from tests.support.cuda_actors import GPU, needs_device

TOOL = os.environ.get("AIORPC_TEST_TOOL", "")
FILE = Path(test_stream_order.__file__)
TESTS = [name for name in vars(test_stream_order) if name.startswith("test_")]

AT_ONCE = max(1, (os.cpu_count() or 1) // 2)
SECONDS = 240.0  # of one test, in all its variants
FOUND = 86  # exit code if the tool has found an error
LOST = "Internal Sanitizer Error"  # racecheck could not follow a launch, which it counts as one


def run_sanitized(test: str) -> str:
    """Run a test under the tool; return what went wrong, "" if it passed and nothing was found."""
    words = run_once(test)
    for _ in range(2):
        words = run_once(test) if LOST in words else words
    return words


def run_once(test: str) -> str:
    tool = ["compute-sanitizer", "--tool", TOOL, "--target-processes", "all"]
    tool += ["--error-exitcode", str(FOUND)]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{FILE}::{test}"]
    try:
        done = subprocess.run(
            [*tool, *words],
            env={**os.environ, "AIORPC_TEST_SECONDS": str(SECONDS)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        return f"it has not ended: {exc.output}"
    return "" if done.returncode == 0 else f"{done.returncode}: {done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[str]]]:
    with runs_at_once(request, "test", run_sanitized, AT_ONCE) as found:
        yield found


@pytest.mark.skipif(not TOOL, reason="AIORPC_TEST_TOOL names no tool")
@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("marks", [pytest.param((), marks=[*GPU, needs_device], id="gpu")])
@pytest.mark.timeout(SECONDS + 60)
def test_nothing_is_found(test: str, marks: object, runs: dict[str, Future[str]]) -> None:
    words = runs[test].result()
    assert not words, words
