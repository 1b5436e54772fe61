"""Programs of a test: their lines are read as they come, and every wait has an end."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.scripts import ROOT

SYSTEM_PROGRAMS = "/usr/sbin:/sbin"
POLL = 0.02  # seconds between two looks at processes that are killed
PATIENCE = 120.0  # seconds for whatever a test waits for; only a failure takes as long

LAUNCHERS = ("SLURM", "SRUN", "SBATCH", "TORCHELASTIC", "JOB_COMPLETION", "AIORPC")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    """Return what a program finds: this Python, the library, and no launcher of the tests."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in TORCHRUN
    }
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:{SYSTEM_PROGRAMS}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **more,
    }


MARK = "TEST_CLUSTER_OF"  # a variable of the environment: which test a process belongs to

# If the tests are killed, the pipe from them ends, and then all processes of the command.
WATCHED = f"""\
exec 3<&0 </dev/null
((cat <&3
  grep -lsz "^{MARK}=${MARK}$" /proc/[0-9]*/environ | cut -d / -f 3 | xargs kill -KILL
 ) >/dev/null 2>&1 &)
exec 3<&-
exec "$@"
"""


class Running:
    """A command in a session of its own. It ends, with all that it has started, at `close`."""

    def __init__(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        """What it has printed so far, errors too."""
        self._changed = threading.Condition()
        self._is_open = True
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            ["bash", "-c", WATCHED, "bash", *command],
            cwd=cwd,
            env={**env, MARK: self._mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def matching(self, pattern: str) -> list[re.Match[str]]:
        """Return the matches of all lines so far."""
        return [found for line in self.lines if (found := re.fullmatch(pattern, line))]

    def wait_for(
        self, pattern: str, count: int = 1, timeout: float = PATIENCE
    ) -> list[re.Match[str]]:
        """Wait until so many lines match, and return the matches."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.matching(pattern)) >= count or not self._is_open, timeout
            )
            found = self.matching(pattern)
            if len(found) < count:
                output = "\n".join(self.lines)
                pytest.fail(f"{len(found)} of {count} lines of {pattern!r} in:\n{output}")
            return found

    def end(self, timeout: float = PATIENCE) -> int:
        """Wait until it has ended, and return its exit code."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail("it does not end:\n" + "\n".join(self.lines))
        self._reader.join(timeout)
        return code

    def close(self) -> None:
        """Kill what is left of it, in whatever session it is and whoever is its parent now."""
        end = time.monotonic() + PATIENCE
        while left := [*self._left()]:  # one that is killed may have started another just before
            assert time.monotonic() < end, left
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            time.sleep(POLL)
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _left(self) -> Iterator[psutil.Process]:
        """Yield the processes of this command that have not ended."""
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_dead = each.status() == psutil.STATUS_ZOMBIE
                if not is_dead and each.environ().get(MARK) == self._mark:
                    yield each
