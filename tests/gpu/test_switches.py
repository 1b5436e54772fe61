"""Each test about an order fails if that part of the synchronization is left out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiorpc_torch._torch.cuda import SWITCHES
from tests.gpu import test_cuda_collate, test_stream_order
from tests.support.cuda_actors import CHANNELS, GPU, NEEDS

HERE = Path(__file__).parent

# Over the CPU the callee has no message before its data: nothing is left to wait for.
ONLY_IPC = {"arguments", "delivery"}


def test_each_part_has_a_test() -> None:
    """Of which `test_fails_without_it` tries that it can fail."""
    assert test_cuda_collate.__name__ != test_stream_order.__name__  # both have noted theirs
    assert {*NEEDS.values()} == {*SWITCHES}


@pytest.mark.parametrize("test", NEEDS)
@pytest.mark.parametrize("marks", [pytest.param((), marks=GPU, id="gpu")])
def test_fails_without_it(test: str, marks: object) -> None:
    """In every variant. Some parts keep the process alive."""
    part = NEEDS[test]
    if CHANNELS is not None and "cuda_ipc" not in CHANNELS and part in ONLY_IPC:
        pytest.skip("these channels go through the CPU")
    if os.environ.get("AIORPC_CUDA_WITHOUT"):
        pytest.skip("something is left out already")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / test)],
        env={**os.environ, "AIORPC_CUDA_WITHOUT": part},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    words = done.stdout + done.stderr
    assert done.returncode == 1 or done.returncode < 0, words
    assert not re.search(r"\d passed", words), words
