"""The programs of the examples, with their callee on a device."""

from pathlib import Path

import pytest

from tests.support.cuda_actors import GPU

pytestmark = [*GPU, pytest.mark.examples]

QUICK = "--quick"

# For each, its options and what it needs beside torch.
PROGRAMS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "cartpole": (["--device", "cuda:0", QUICK], ("gymnasium",)),
    "reinforce": (["--device", "cuda:0", QUICK], ("gymnasium",)),
    "parameter_server": (
        ["--device", "cuda:0", "--server-device", "cuda:0", "--iterations", "9"],
        ("torchvision",),
    ),
    "rnn": (["--device", "cuda:0", QUICK], ()),
    "mnist": (["--num-gpus", "1", QUICK], ("torchvision",)),
    "inference": (["--device", "cuda:0", "--clients", "1", QUICK], ("torchvision",)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_runs(program: str, tmp_path: Path) -> None:
    """To its end, without a warning."""
    options, needed = PROGRAMS[program]
    for module in (*needed, "psutil"):
        pytest.importorskip(module)
    from tests.support.example_programs import run

    words = [*options]
    if program == "mnist":
        run("digits", str(tmp_path), "--train", "600", "--test", "200")
        words += ["--data", str(tmp_path)]
    assert run(program, *words, timeout=110)
