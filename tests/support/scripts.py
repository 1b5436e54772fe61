"""Scripts as a user writes and starts them, each in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


# ── programs ────────────────────────────────────────────────────────────────────────────────────


def program(tmp_path: Path, text: str) -> Path:
    """Write a user's script."""
    path = tmp_path / "program.py"
    path.write_text(
        "import asyncio, os, sys\nimport aiorpc_torch as aiorpc\n" + textwrap.dedent(text)
    )
    return path


def run(path: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user would, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(path), *args],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


@contextlib.contextmanager
def started(path: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Start it in its own process group, which is killed at the end of the block."""
    with subprocess.Popen(
        [sys.executable, str(path), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
