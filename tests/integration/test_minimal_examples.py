"""The minimal examples, run as their first lines say."""

import os
import subprocess
import sys

import pytest

from tests.support import guides
from tests.support.example_programs import ROOT

OUTPUT = {
    "actor_learner": ["better than at first: True"],
    "attach": ["trainer0 1.5", "trainer1 1.5"],
    "batching": ["1280 calls, fewer batches: True"],
    "first_call": [
        "an exception: no such thing | caused by RemoteTraceback",
        "in a thread: 100",
        "many at once: [8, 9, 10]",
        "one call: 7",
        "timeout: Counter.never on other",
    ],
    "parameter_server": ["trained: True"],
    "pipeline": ["learned: True"],
    "recover": ["version 1, step 200, learned: True", "version 2, step 400, learned: True"],
    "shards": ["version 1, learned: True"],
    "stream": ["all: a0 a1 a2 a3", "closed: both", "left at: b2", "sum: 4950"],
    "supervised": [
        "<supervised Env on env0, incarnation 1>",
        "<supervised Env on env1, incarnation 1>",
        "processes: 4",
        "rollouts: 100",
    ],
    "sweep": ["best rate: 0.5", "rate 1.5: it diverged"],
    "torchrun_ddp": ["learner 0 has learned: True", "learner 1 has learned: True"],
    "torchrun_server_client": [
        "client1: 'never', three times or more: True",
        "client2: 'never', three times or more: True",
    ],
}
"""What each prints, sorted: processes write in any order."""

TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "3")


IN_A_GUIDE = "torchrun_ddp"  # that guide's own test runs it, too


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name == IN_A_GUIDE else [])
        for name in OUTPUT
    ],
)
def test_a_minimal_example(name: str) -> None:
    start = ["-m", *TORCHRUN] if "torchrun" in name else []
    done = subprocess.run(
        [sys.executable, *start, f"examples/minimal/{name}.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        # Unbuffered, the processes would write their lines in parts.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert guides.has_printed(done.stdout, OUTPUT[name]), done.stdout


def test_the_guide_shows_its_program() -> None:
    body = (ROOT / "examples" / "minimal" / "torchrun_ddp.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n# ddp.py\n{body}```" in (ROOT / "docs" / "guides" / "ddp.md").read_text()


def test_each_is_short_and_tried() -> None:
    """A reader sees each on one page."""
    files = {path.stem: path for path in (ROOT / "examples" / "minimal").glob("*.py")}
    assert files.keys() == OUTPUT.keys()
    assert all(len(path.read_text().splitlines()) <= 60 for path in files.values())
