"""Everything that needs a CUDA device, in one command: `make gpu`, or `python -m tests.gpu`.

What decides most comes first. Each stage has a time limit, all together eight minutes. A page of
results is written after each stage: gpu.md in $OUT, else in out/. The exit code is 1 unless every
stage has passed. It needs Python and torch with CUDA; what else is missing comes from the wheels of
`make gpu-carry`, without a network.

    python -m tests.gpu [--rehearse | --sanitize] [--wheels FOLDER] [--out FOLDER]
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import carry, page
from .stages import ROOT, Result, Runner, Stage, run_all

FOLDER = Path("tests/gpu")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
PYTEST += ["-W", "default"]  # whatever versions are there: a warning decides nothing

CHANNELS, DEVICE = "AIORPC_TORCH_CHANNELS", "AIORPC_TEST_DEVICE"
OVER_CPU = "cuda_basic,basic"
RAW, IPC_TEST = "raw torch", "test_raw_torch.py::test_cuda_ipc"

ONLY_DEVICE = {"device", "switches"}
SLOWER = 4.0  # programs on a CPU that is shared, against those on a device


def tests(name: str, seconds: float, *files: str) -> Stage:
    return Stage(name, seconds, [*PYTEST, *(FOLDER / each for each in files)], has_tests=True)


def stages(device: str) -> list[Stage]:
    """Return the stages, 480 seconds in all; for "cpu", those that can be rehearsed."""
    benchmark = ["benchmarks.cuda", "--quick", "--repeat", "2", "--device", device]
    found = [
        Stage("device", 30.0, [sys.executable, "-m", "tests.gpu.machine"]),
        tests(RAW, 60.0, "test_raw_torch.py"),
        tests(
            "order",
            120.0,
            "test_stream_order.py",
            "test_staging.py",
            "test_staging_internals.py",
            "test_forkserver.py",
        ),
        tests(
            "collate",
            50.0,
            "test_cuda_collate.py",
            "test_cuda_collate_internals.py",
            "test_utilisation.py",
        ),
        tests("switches", 90.0, "test_left_out.py"),
        tests("programs", 70.0, "test_programs.py"),
        Stage("benchmark", 60.0, [sys.executable, "-m", *benchmark]),
    ]
    if device != "cpu":
        return found
    kept = [each for each in found if each.name not in ONLY_DEVICE]
    return [dataclasses.replace(each, seconds=each.seconds * SLOWER) for each in kept]


def sanitized() -> list[Stage]:
    """Return runs of the order tests under compute-sanitizer."""
    tool = "compute-sanitizer"

    def under(name: str) -> Stage:
        run = tests(name, 900.0, "test_sanitized.py")
        return dataclasses.replace(run, environment={"AIORPC_TEST_TOOL": name})

    check, *_ = stages("cuda:0")
    return [check, Stage(tool, 30.0, [tool, "--version"]), under("memcheck"), under("racecheck")]


def environment(packages: Path, device: str) -> dict[str, str]:
    """Return the environment of all stages: this source tree first, then what was carried."""
    paths = [str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whatever plugins are there
    return {**os.environ, **found, **alone, DEVICE: device}


def channels(results: Sequence[Result]) -> str | None:
    """Return what AIORPC_TORCH_CHANNELS should be: "" if CUDA IPC works, None if it is unknown."""
    if given := os.environ.get(CHANNELS):
        return given
    for result in results:
        if result.stage.name == RAW and result.state != "left out":
            has_ipc = IPC_TEST in result.tests_that("passed")
            return "" if has_ipc else OVER_CPU
    return None


def notes(results: Sequence[Result], lacking: Sequence[str]) -> list[str]:
    """Return what the page says of the machine."""
    if results[0].stage.name != "device":
        return ["a REHEARSAL on the CPU: nothing on this page has run on a device"]
    found = results[0].output.splitlines()
    names = {None: "not known", "": "CUDA IPC", OVER_CPU: f"{OVER_CPU}: no CUDA IPC is possible"}
    chosen = channels(results)
    told = [*filter(None, found), f"channel: {names.get(chosen, chosen)}"]
    return [*told, f"packages that are missing: {', '.join(lacking)}"] if lacking else told


def run(given: argparse.Namespace, packages: Path) -> bool:
    """Run the stages, write the page after each, and return whether every one has passed."""
    lacking = carry.unpack(given.wheels, packages)
    device = "cpu" if given.rehearse else "cuda:0"
    chosen = sanitized() if given.sanitize else stages(device)
    runner = Runner(given.out, environment(packages, device))

    def report(results: Sequence[Result]) -> None:
        if device != "cpu" and (found := channels(results)):
            runner.environment[CHANNELS] = found
        told = page.page(results, notes(results, lacking), total=len(chosen))
        (given.out / "gpu.md").write_text(told)
        print(page.line(results[-1]), flush=True)
        if len(results) == len(chosen):
            print(f"\n{told}")

    return not page.is_red(run_all(runner, chosen, report), len(chosen))


def main() -> int:
    """Parse the command line and run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--rehearse", action="store_true", help="try the stages without a device")
    either.add_argument("--sanitize", action="store_true", help="memcheck and racecheck instead")
    parser.add_argument("--wheels", type=Path, default=carry.FOLDER, help="of `make gpu-carry`")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "out"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aiorpc-gpu-") as packages:
        return 0 if run(given, Path(packages)) else 1


if __name__ == "__main__":
    sys.exit(main())
