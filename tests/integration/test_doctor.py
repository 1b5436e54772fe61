"""The command `python -m aiorpc_torch doctor`."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_command() -> None:
    """It starts a world with each transport, and its exit code says whether all is well."""
    done = subprocess.run(
        [sys.executable, "-m", "aiorpc_torch", "doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("uv", "shm"):
        assert re.search(rf"^ok +transport {name}: a call takes [\d.]+ ms", done.stdout, re.M)
    assert done.stdout.endswith("0 problems\n")
