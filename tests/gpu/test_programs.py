"""The programs of the examples, with their callee on a device."""

from pathlib import Path

import pytest

from tests.support.cuda_actors import GPU

pytestmark = [*GPU, pytest.mark.examples]

DRAWS = ("rich", "matplotlib", "psutil")

# For each, its options and what it needs beside torch.
PROGRAMS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "cartpole": (["--device", "cuda:0"], ("gymnasium", *DRAWS)),
    "reinforce": (["--device", "cuda:0"], ("gymnasium", *DRAWS)),
    "parameter_server": (
        ["--device", "cuda:0", "--server-device", "cuda:0"],
        ("torchvision", *DRAWS),
    ),
    "rnn": (["--device", "cuda:0"], DRAWS),
    "mnist": (["--num-gpus", "1"], ("torchvision", *DRAWS)),
    "inference": (["--device", "cuda:0", "--clients", "1"], ("torchvision", *DRAWS)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_runs(program: str, tmp_path: Path) -> None:
    """To its end, without a warning."""
    options, needed = PROGRAMS[program]
    for module in needed:
        pytest.importorskip(module)
    from tests.support.example_programs import run

    words = [*options, "--quick", "--plot", str(tmp_path / "plot.png")]
    if program == "mnist":
        run("digits", str(tmp_path), "--train", "600", "--test", "200")
        words += ["--data", str(tmp_path)]
    assert run(program, *words, timeout=110)
