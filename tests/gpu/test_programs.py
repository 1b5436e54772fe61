"""The programs of the examples, with what they compute on a device."""

from collections.abc import Iterator
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.at_once import runs_at_once
from tests.support.cuda_actors import GPU, HERE, REHEARSED

QUICK = "--quick"
SMALL = ("--model", "resnet18", "--side", "32", "--batch", "8")
ON_DEVICE = ("--device", str(HERE))

# For each, its options and what it needs beside torch.
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "parameter_server": (
        ("--server-device", str(HERE), *SMALL, "--iterations", "9"),
        ("torchvision",),
    ),
    "rnn": ((QUICK,), ()),
    "pipeline": ((QUICK,), ()),
    "mnist": (("--num-gpus", str(int(not REHEARSED)), QUICK), ("torchvision",)),
    "cartpole": ((QUICK,), ("gymnasium",)),
    "reinforce": ((QUICK,), ("gymnasium",)),
    "selfplay": ((QUICK,), ("matplotlib",)),
    "inference": (("--clients", "1", QUICK), ("torchvision",)),
}


def lacks(program: str) -> str:
    """Return the packages that it needs and this machine does not have."""
    needed = (*PROGRAMS[program][1], "psutil")
    return ", ".join(name for name in needed if find_spec(name) is None)


@pytest.fixture(scope="module")
def outputs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[str]]]:
    folder = tmp_path_factory.mktemp("programs")

    def run(program: str) -> str:
        return "" if lacks(program) else output_of(program, folder)

    with runs_at_once(request, "program", run) as found:
        yield found


def output_of(program: str, folder: Path) -> str:
    """Run a program to its end."""
    from tests.support.example_programs import run

    words = [*ON_DEVICE, *PROGRAMS[program][0]]
    if program == "mnist":
        run("digits", str(folder), "--train", "600", "--test", "200")
        words += ["--data", str(folder)]
    if program == "selfplay":
        words += ["--plot", str(folder / "selfplay.png")]
    return run(program, *words, python=(), timeout=55)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=[*GPU, pytest.mark.examples, without])
        for name in PROGRAMS
        for needs in [lacks(name)]
        for without in [pytest.mark.skipif(bool(needs), reason=f"not installed: {needs}")]
    ],
)
def test_runs(program: str, outputs: dict[str, Future[str]]) -> None:
    assert outputs[program].result()
