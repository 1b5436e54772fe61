"""The minimal examples, run as their first lines say."""

import os
import subprocess
import sys

import pytest

from tests.support.example_programs import ROOT


@pytest.mark.parametrize("name", ["attach"])
def test_a_minimal_example(name: str) -> None:
    done = subprocess.run(
        [sys.executable, f"examples/minimal/{name}.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=55,
        # Unbuffered, the processes would write their lines in parts.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["trainer0 1.5", "trainer1 1.5"]
