"""The roles of examples/week.py as steps of a job of Slurm, which a loop of a shell starts again.

Each role has a second step in reserve, which has imported torch. To run inside of an allocation.
Signals travel by Slurm too, as from a login node.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import IO

from ._chaos_world import PLACES, PROGRAM, World
from ._hosts import LOOP


class OnSlurm(World):
    """The roles on the nodes of this process's allocation, in turn."""

    faults = "kill", "freeze", "drain", "hang", "cancel", "end"
    deaths = "kill", "drain", "hang", "cancel", "end"
    last = "kill", "end"

    def __init__(self, folder: Path, *words: str) -> None:
        self._job = os.environ["SLURM_JOB_ID"]
        names = _ask("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        nodes = dict(zip(sorted({*PLACES.values()}), cycle(names), strict=False))
        self._nodes = {role: nodes[number] for role, number in PLACES.items()}
        self._loops = list[subprocess.Popen[str]]()
        self._folder = folder
        super().__init__(folder, *words)

    def _loop(self, role: str, words: Sequence[str], errors: IO[str]) -> "subprocess.Popen[str]":
        lock = f"--lock={self._folder / role}.lock"
        step = self._step(role, sys.executable, "-m", PROGRAM, *words, lock)
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        process = subprocess.Popen(
            ["sh", "-c", f"({LOOP}) & {LOOP}" if "--supervise" in words else LOOP, "sh", *step],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | environment,
            start_new_session=True,
        )
        self._loops.append(process)
        return process

    def _step(self, role: str, *words: str) -> list[str]:
        """Return the command that runs another one on a role's node, beside all others there."""
        where = ["--nodes=1", "--ntasks=1", f"--nodelist={self._nodes[role]}"]
        return ["srun", "--quiet", "--overlap", "--unbuffered", *where, *words]

    def _run(self, role: str, *words: str) -> None:
        _ask(*self._step(role, *words))

    def cancel(self, role: str) -> None:
        """Cancel a role's step: SIGTERM to its process and to the supervisor of that."""
        self._cancel(role)

    def end(self, role: str) -> None:
        """Kill all processes of a role's step."""
        self._cancel(role, "--signal=KILL")

    def _cancel(self, role: str, *options: str) -> None:
        environment = f"/proc/{self._pid(role)}/environ"
        with contextlib.suppress(subprocess.CalledProcessError):  # it has just ended by itself
            found = _ask(*self._step(role, "grep", "-zo", "SLURM_STEP_ID=[0-9]*", environment))
            _ask("scancel", *options, f"{self._job}.{found.strip(chr(0)).partition('=')[2]}")

    def close(self) -> None:
        """End all steps, and the loops that would start them again."""
        for each in self._loops:
            os.killpg(each.pid, signal.SIGKILL)
        _ask("scancel", "--signal=KILL", self._job)


def _ask(*words: str) -> str:
    return subprocess.check_output(
        words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


@contextlib.contextmanager
def world(folder: Path, *words: str) -> Iterator[World]:
    """Start the program in this allocation; at the end all of its processes are killed."""
    with contextlib.closing(OnSlurm(folder, *words)) as found:
        yield found
