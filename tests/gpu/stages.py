"""Stages of the run on a machine with a device: a command each, with a time limit of its own."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]

# Variables for tests/gpu/records.py: the file of the records, and the seconds of a test.
RECORDS, SECONDS = "AIORPC_TEST_RECORDS", "AIORPC_TEST_SECONDS"

State = Literal["passed", "failed", "left out"]


@dataclass(frozen=True)
class Stage:
    """A command, and the seconds that it may take; with `has_tests` it is a run of pytest."""

    name: str
    seconds: float
    command: Sequence[str | Path]
    has_tests: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """The outcome of a stage, the reason if it has not passed, and what was printed or tested."""

    stage: Stage
    state: State
    reason: str = ""
    seconds: float = 0.0
    output: str = ""
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)

    def tests_that(self, *states: str) -> list[str]:
        return [name for name, record in self.tests.items() if record["state"] in states]


class StageError(Exception):
    """A command could not be started, or was killed at the end of its time."""


class Runner:
    """A runner of stages, one after another.

    A stage has its own seconds and those that earlier ones have left: so all together end in time.

    Args:
        folder: Folder of the log and the records.
        environment: Environment of every stage.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] = os.environ) -> None:
        self.folder, self.environment = folder, dict(environment)
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "gpu.log"
        self.log.write_text("")
        self.limit = time.monotonic()

    def run(self, stage: Stage) -> Result:
        """Run a stage to its end, or kill it at the end of its time."""
        start = time.monotonic()
        self.limit += stage.seconds
        result = (self._run_tests if stage.has_tests else self._run_program)(stage)
        result.seconds = time.monotonic() - start
        return result

    def _run_program(self, stage: Stage) -> Result:
        offset = self.log.stat().st_size
        try:
            code = self._run(stage, stage.command)
            reason = f"exit code {code}" if code else ""
        except StageError as exc:
            reason = str(exc)
        output = self._logged(offset)
        return Result(stage, "failed" if reason else "passed", reason, output=output)

    def _run_tests(self, stage: Stage) -> Result:
        """Run pytest, again without the tests that have run if it hangs or dies in one."""
        path = self.folder / f"gpu-{stage.name}.jsonl"
        path.unlink(missing_ok=True)
        environment = {**stage.environment, RECORDS: str(path)}
        stage = dataclasses.replace(stage, environment=environment)
        # pytest's own timer would replace the one of the records, which ends the process.
        words = ["-p", "tests.gpu.records", "-o", "faulthandler_timeout=0"]
        offset, reason, code, lost = self.log.stat().st_size, "", None, -1
        while not reason and lost < (lost := len(_unfinished(read_records(path)))):
            done = [word for name in read_records(path) for word in ("--deselect", name)]
            try:
                code = self._run(stage, [*stage.command, *words, *done])
            except StageError as exc:
                reason = str(exc)
        tests = read_records(path)
        path.unlink(missing_ok=True)
        result = Result(stage, "failed", reason, output=self._logged(offset), tests=tests)
        result.reason = reason or _fault_of(result, code)
        result.state = "failed" if result.reason else "passed"
        return result

    def _run(self, stage: Stage, command: Sequence[str | Path]) -> int:
        """Run a command in a process group of its own; return its exit code.

        Raises:
            StageError: if it has not ended when the time of the stage is over.
        """
        with self.log.open("a") as log:
            words = " ".join(map(str, command)).replace("\n", " ")
            print(f"== {stage.name}: {words}", file=log, flush=True)
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env={**self.environment, **stage.environment},
                    start_new_session=True,
                )
            except OSError as exc:
                raise StageError(f"it cannot be started: {exc}") from None
        try:
            return process.wait(max(0.0, self.limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise StageError("its time was over: it was killed") from None
        finally:
            _kill_group(process)

    def _logged(self, offset: int) -> str:
        with self.log.open(errors="replace") as file:
            file.seek(offset)
            return file.read().partition("\n")[2]  # without the line of the command


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last record of each test, in the order in which they began."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        found[record.pop("test")] = record
    return found


def _unfinished(tests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [name for name, record in tests.items() if record["state"] == "began"]


def _fault_of(result: Result, code: int | None) -> str:
    """Return why a run of pytest, which has ended by itself, has not passed; "" if it has."""
    if lost := result.tests_that("began"):
        return f"{len(lost)} ended the process, or hung"
    if failed := result.tests_that("failed"):
        return f"{len(failed)} failed"
    if code not in (0, 5):
        return f"pytest ended with exit code {code}"
    return "" if result.tests_that("passed") else "no test has passed"


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and what it started: the children of worlds are in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(
    runner: Runner, stages: Sequence[Stage], after: Callable[[list[Result]], None]
) -> list[Result]:
    """Run the stages; call `after` with the results so far as each ends.

    Without the first one, which checks for a device, all others are left out. `after` may change
    the environment of later ones.
    """
    results: list[Result] = []
    for stage in stages:
        if results and results[0].state == "failed":
            results.append(Result(stage, "left out", f"{results[0].stage.name} has failed"))
        else:
            results.append(runner.run(stage))
        after(results)
    return results
