"""The programs of the examples, with their callee on a device."""

from pathlib import Path

import pytest

from tests.support.cuda_actors import GPU
from tests.support.example_programs import run

pytest.importorskip("gymnasium")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = [*GPU, pytest.mark.examples]

PROGRAMS = {
    "cartpole": ["--device", "cuda:0"],
    "reinforce": ["--device", "cuda:0"],
    "parameter_server": ["--device", "cuda:0", "--server-device", "cuda:0"],
    "rnn": ["--device", "cuda:0"],
    "mnist": ["--num-gpus", "1"],
    "inference": ["--device", "cuda:0", "--clients", "1"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_runs(program: str, tmp_path: Path) -> None:
    """To its end, without a warning."""
    words = [*PROGRAMS[program], "--quick"]
    if program == "mnist":
        run("digits", str(tmp_path), "--train", "600", "--test", "200")
        words += ["--data", str(tmp_path)]
    assert run(program, *words, timeout=110)
