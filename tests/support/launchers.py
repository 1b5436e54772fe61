"""The variables of launchers: of torchrun, of a task of Slurm's, of a pod of Kubernetes'."""

import pytest

NAMES = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NODELIST": "node[03-05]",
}
POD = {"JOB_COMPLETION_INDEX": "2"}


def forget_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what this process has of them: the tests themselves may be a task or a pod."""
    for name in (*NAMES, *TASK, *POD, "SLURM_STEP_NUM_TASKS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, *environments: dict[str, str], **more: str) -> None:
    for environment in (*environments, more):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
