"""The tests of a device without one: their worlds, actors and calls, with tensors on the CPU.

So a change of the library cannot break them unseen. What they say about an order needs a device.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.support.example_programs import ROOT

FILES = [
    "test_raw_torch.py",
    "test_stream_order.py",
    "test_forkserver.py",
    "test_cuda_collate.py",
    "test_cuda_collate_internals.py",
]


@pytest.mark.slow
def test_what_can_be_rehearsed_passes() -> None:
    """Without any plugin of pytest, as on a bare machine."""
    files = [f"tests/gpu/{each}" for each in FILES]
    alone = {"AIORPC_TEST_DEVICE": "cpu", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert int(found[1]) > 25
