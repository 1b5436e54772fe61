"""Two tasks of Slurm, at the port of their job."""

import contextlib
import os
import random
import socket

import pytest

from .test_launchers import SIZE, check_world, no_torchrun

__all__ = ["no_torchrun"]


def free_job(monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a job of Slurm at whose port nobody listens now."""
    while True:
        job = random.randrange(10**6)
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        with contextlib.suppress(OSError):
            port = 15_000 + job * 97 % 10_000  # of step 0
            socket.create_server(("127.0.0.1", port)).close()
            return os.environ["SLURM_JOB_ID"]


@pytest.mark.slow
@pytest.mark.promise("worlds.launchers")
def test_tasks_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks of Slurm on one node, with nothing else in their environment."""
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node03")
    task = {"SLURM_JOB_ID": free_job(monkeypatch), "SLURM_NTASKS": str(SIZE)}
    check_world("SLURM_PROCID", task)
