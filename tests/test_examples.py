"""The examples, run as a user runs them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.examples

ROOT = Path(__file__).parent.parent


def demo(*args: str) -> list[str]:
    """The demo's command line, every warning an error."""
    return [sys.executable, "-X", "dev", "-W", "error", "-m", "examples.cartpole", *args]


def test_cartpole(tmp_path: Path) -> None:
    """It trains, compares batched with unbatched, and writes its plot where it says."""
    picture = tmp_path / "curve.png"
    done = subprocess.run(
        demo("--seconds", "6", "--compare", "0.5", "--plot", str(picture)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=58,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "unbatched" in done.stdout
    assert f"learning curve: {picture}" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("after", [0.3, 3.5, 12.0])
def test_cartpole_interrupted(after: float) -> None:
    """Ctrl-C at any time, also while it imports and starts: two seconds, no traceback."""
    with subprocess.Popen(
        [sys.executable, "-m", "examples.cartpole", "--seconds", "40"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        time.sleep(after)  # "at any time" is what is tested, so no event decides it
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - start < 2.0
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in errors
