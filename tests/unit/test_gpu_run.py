"""`make gpu` without a device: its stages, time limits, page and packages, with other commands."""

import importlib.util
import json
import os
import select
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu import __main__ as gpu, carry, conftest, page
from tests.gpu.stages import ROOT, Result, Runner, Stage, run_all

pytestmark = pytest.mark.slow

LONG = 60.0  # seconds: no stage here takes as long


def program(name: str, source: str, seconds: float = LONG) -> Stage:
    return Stage(name, seconds, [sys.executable, "-c", source])


def lines_of(results: Sequence[Result]) -> dict[str, str]:
    return {result.stage.name: result.state for result in results}


# ── stages ──────────────────────────────────────────────────────────────────────────────────────


def test_stages_run_in_order(tmp_path: Path) -> None:
    """Each is reported as it ends; the output of each is its own."""
    seen: list[dict[str, str]] = []
    stages = [program("one", "print(1)"), program("two", "print(2); raise SystemExit(3)")]
    stages.append(program("three", "print(3)"))
    results = run_all(Runner(tmp_path), stages, lambda found: seen.append(lines_of(found)))
    assert seen[-1] == {"one": "passed", "two": "failed", "three": "passed"}
    assert [len(each) for each in seen] == [1, 2, 3]
    assert [result.output for result in results] == ["1\n", "2\n", "3\n"]
    assert results[1].reason == "exit code 3"
    assert page.is_red(results, 3)
    assert not page.is_red(results[:1], 1)
    assert page.is_red(results[:1], 3), "the others have not run"


def test_without_the_first_the_others_are_left_out(tmp_path: Path) -> None:
    stages = [program("device", "raise SystemExit(1)"), program("order", "print()")]
    results = run_all(Runner(tmp_path), stages, lambda _: None)
    assert lines_of(results) == {"device": "failed", "order": "left out"}
    assert "RED: failed: device" in page.page(results, [], total=2)
    assert "device has failed" in page.page(results, [], total=2)


def test_a_stage_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """The next one runs. What it has printed by then is kept."""
    hangs = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
print(child.pid, flush=True)
child.wait()
"""
    runner = Runner(tmp_path)
    hung, after = [
        runner.run(program("hangs", hangs, 2.0)),
        runner.run(program("next", "print(5)")),
    ]
    assert (hung.state, hung.reason) == ("failed", "its time was over: it was killed")
    pid = hung.output.strip()  # none, if this machine is too busy to start it
    assert not pid or has_ended(int(pid))
    assert after.output == "5\n"


def has_ended(pid: int) -> bool:
    """Wait for the end of a process, which is another's child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], LONG)[0])
    finally:
        os.close(descriptor)


def test_seconds_that_are_left_go_to_later_stages(tmp_path: Path) -> None:
    """All together end in time: a stage ends by the sum of the seconds up to it."""
    runner = Runner(tmp_path)
    start = runner.limit
    run_all(runner, [program("one", "", 5.0), program("two", "", 7.0)], lambda _: None)
    assert runner.limit == pytest.approx(start + 12.0)


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    result = Runner(tmp_path).run(Stage("tool", LONG, ["no-such-tool-here"]))
    assert result.state == "failed"
    assert "it cannot be started" in result.reason
    assert "no-such-tool-here" in result.reason


# ── runs of pytest ──────────────────────────────────────────────────────────────────────────────

TESTS = """
import os
import threading
import pytest

def test_passes():
    pass

def test_fails():
    assert 1 == 2, "not equal"

@pytest.mark.timeout(0.2)
def test_hangs():
    threading.Event().wait()

def test_dies():
    os.abort()

@pytest.mark.skip(reason="nothing to do")
def test_skipped():
    pass

def test_last():
    pass
"""


INI = "[pytest]\nfaulthandler_timeout = 50\nmarkers =\n    timeout: seconds\n"


def pytest_stage(folder: Path, source: str, *words: str) -> Stage:
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_some.py").write_text(source)
    only = ("-p", "no:cacheprovider", "-p", "no:timeout", "-p", "no:xdist", *words)
    command = [sys.executable, "-m", "pytest", "-q", *only, str(folder / "test_some.py")]
    return Stage("tests", LONG, command, has_tests=True)


@pytest.mark.slow
def test_tests_go_on_after_one_that_hangs_or_dies(tmp_path: Path) -> None:
    """Each is on the page with its reason."""
    runner = Runner(tmp_path / "out")
    result = runner.run(pytest_stage(tmp_path, TESTS, "--rootdir", str(tmp_path)))
    states = {name.rpartition("::")[2]: each["state"] for name, each in result.tests.items()}
    assert states == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_hangs": "began",
        "test_dies": "began",
        "test_skipped": "skipped",
        "test_last": "passed",
    }
    assert (result.state, result.reason) == ("failed", "2 ended the process, or hung")
    told = page.page([result], [], total=1)
    assert "test_some.py::test_fails: failed: AssertionError: not equal" in told
    assert "test_some.py::test_hangs: hung, or ended the process" in told
    assert "test_some.py::test_skipped: left out: nothing to do" in told
    assert "| tests | failed |" in told


def test_tests_that_are_all_skipped_have_not_passed(tmp_path: Path) -> None:
    source = "import pytest\n@pytest.mark.skip(reason='no')\ndef test_one():\n    pass\n"
    result = Runner(tmp_path / "out").run(pytest_stage(tmp_path, source))
    assert (result.state, result.reason) == ("failed", "no test has passed")


def test_tests_that_cannot_be_collected(tmp_path: Path) -> None:
    result = Runner(tmp_path / "out").run(pytest_stage(tmp_path, "import no_such_module"))
    assert (result.state, result.reason) == ("failed", "pytest ended with exit code 2")
    assert "no_such_module" in result.output


# ── the real stages ─────────────────────────────────────────────────────────────────────────────


def test_all_stages_end_within_eight_minutes() -> None:
    """What decides most comes first, and every file of tests is in a stage."""
    stages = gpu.stages("cuda:0")
    assert sum(stage.seconds for stage in stages) <= 480
    assert [stage.name for stage in stages[:4]] == ["device", "raw torch", "order", "collate"]
    words = [word for stage in (*stages, *gpu.sanitized()) for word in stage.command]
    files = {ROOT / word for word in words if str(word).endswith(".py")}
    assert files == {*(ROOT / "tests/gpu").glob("test_*.py")}


def test_raw_torch_comes_first() -> None:
    """With plain pytest too; tests of other folders stay where they are."""

    def item(module: str) -> Any:
        return SimpleNamespace(module=SimpleNamespace(__name__=module))

    names = ["tests.gpu.test_cuda_collate", "tests.other", "tests.gpu.test_raw_torch"]
    items = [item(name) for name in names]
    conftest.pytest_collection_modifyitems(items)
    assert [each.module.__name__ for each in items] == names[::-1]


def test_the_channel_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's; else the one over the CPU where raw torch has no CUDA IPC."""
    monkeypatch.delenv(gpu.CHANNELS, raising=False)

    def found(state: str) -> list[Result]:
        tests = {gpu.IPC_TEST: {"state": state}}
        return [Result(Stage(gpu.RAW, 1.0, []), "passed", tests=tests)]

    assert gpu.channels([]) is None
    assert gpu.channels(found("passed")) == ""
    assert gpu.channels(found("skipped")) == gpu.channels(found("began")) == "cuda_basic,basic"
    monkeypatch.setenv(gpu.CHANNELS, "cuda_ipc,basic")
    assert gpu.channels(found("skipped")) == "cuda_ipc,basic"


def test_the_name_of_the_test_of_ipc() -> None:
    file, _, name = gpu.IPC_TEST.partition("::")
    assert f"def {name}(" in (ROOT / "tests/gpu" / file).read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_red_without_a_device(tmp_path: Path) -> None:
    """It says whether torch is a CPU build or finds no device; pytest alone skips its tests."""
    words = ["--out", str(tmp_path), "--wheels", str(tmp_path / "none")]
    line = [sys.executable, "-m", "tests.gpu", *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    told = (tmp_path / "gpu.md").read_text()
    assert told.startswith("# RED: failed: device")
    assert "no device: torch" in told
    assert ("is a build for the CPU" in told) == (torch.version.cuda is None)
    assert told.count("| left out |") == len(gpu.stages("cuda:0")) - 1
    assert told in done.stdout


# ── packages that are carried ───────────────────────────────────────────────────────────────────


def wheel(folder: Path, name: str, tags: str = "py3-none-any", size: int = 0) -> None:
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-99.0-{tags}.whl", "w") as file:
        file.writestr(f"{name.replace('-', '_')}.py", "x" * size)


def test_the_wheels_fit(tmp_path: Path) -> None:
    """They have to, with the tracked files; and no package may be missing."""
    with pytest.raises(ValueError, match=r"has no wheel of anyio, .*pytest"):
        carry.check(tmp_path, 0)
    for name in carry.NEEDED:
        wheel(tmp_path, name)
    assert f"{len(carry.NEEDED)} wheels" in carry.check(tmp_path, carry.tracked_bytes())
    wheel(tmp_path, "anyio", size=2000)
    with pytest.raises(ValueError, match="at most 67,108,864 can be"):
        carry.check(tmp_path, carry.MOST_BYTES - 1000)


def test_the_tracked_files_leave_room() -> None:
    """The wheels take three MiB."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    assert carry.tracked_bytes() < carry.MOST_BYTES // 2


def test_only_what_is_missing_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed stays, and wheels of other Pythons are ignored."""
    folder, into = tmp_path / "wheels", tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setattr(
        carry, "NEEDED", {"pytest": (8,), "not-here": (), "nor-here": (), "old": ()}
    )
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel(folder, "pytest")
    wheel(folder, "not-here", f"{here}-{here}-manylinux_2_28_x86_64")
    wheel(folder, "nor-here", "cp36-abi3-manylinux_2_28_x86_64")
    wheel(folder, "old", "cp310-cp310-manylinux_2_28_x86_64")
    assert carry.unpack(folder, into) == ["old"]
    assert sorted(each.name for each in into.iterdir()) == ["nor_here.py", "not_here.py"]


def test_the_command_needs_no_package() -> None:
    """`python -m tests.gpu` begins before anything is unpacked: it imports what Python has."""
    source = "import sys, tests.gpu.__main__; print([*sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", source]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout.replace("'", '"'))}
    assert not loaded & {
        "torch",
        "aiorpc_torch",
        *(name.replace("-", "_") for name in carry.NEEDED),
    }


@pytest.mark.parametrize("name", ["anyio", "msgspec", "torch"])
def test_every_dependency_is_carried_or_is_torch(name: str) -> None:
    """Those of the core in pyproject.toml."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {word.partition(">")[0] for word in project["dependencies"]}
    assert needed == {"anyio", "msgspec", "torch"}
    assert name == "torch" or name in carry.NEEDED
    assert importlib.util.find_spec(name)
