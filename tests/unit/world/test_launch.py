"""What the environment says of a process: torchrun's, Slurm's and Kubernetes' variables."""

from pathlib import Path

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch._world import launch
from aiorpc_torch._world.launch import (
    find_number,
    find_port,
    find_setting,
    find_tls,
    is_single_host,
    meeting_url,
)
from tests.support.certificates import Authority
from tests.support.launchers import POD, TASK, forget_launcher, set_all


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may be a task or a pod."""
    forget_launcher(monkeypatch)


def values() -> list[str]:
    return [find_setting(name).value for name in launch.NAMES]


# ── precedence ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("worlds.launchers")
def test_arguments_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then torchrun's variables, each by itself, Slurm's and Kubernetes'."""
    set_all(monkeypatch, POD, WORLD_SIZE="4", MASTER_ADDR="job-0.svc")
    assert values() == ["2", "4", "job-0.svc", "29500"]
    set_all(monkeypatch, TASK)
    assert values() == ["3", "4", "job-0.svc", str(15000 + (1234 * 97 + 2) % 10000)]
    set_all(monkeypatch, RANK="1", MASTER_PORT="7")
    assert values() == ["1", "4", "job-0.svc", "7"]
    assert [find_number("RANK", None), find_number("RANK", 0)] == [1, 0]


def test_the_url_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument's, torch's own where torchrun's store may be, or of what was found."""
    set_all(monkeypatch, TASK)
    assert meeting_url(None, 8) == "tcp://node03:24700"
    assert meeting_url("tcp://a:1", 8) == "tcp://a:1"
    assert meeting_url(None, 1).startswith("unix://")
    monkeypatch.setenv("MASTER_ADDR", "fd00::1")
    assert meeting_url(None, 8) == "tcp://[fd00::1]:24700"
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert meeting_url(None, 8) == "env://"


# ── Slurm ───────────────────────────────────────────────────────────────────────────────────────


def test_an_interactive_shell_is_a_step_of_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the number of tasks of its job."""
    set_all(monkeypatch, TASK, SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0")
    assert find_number("WORLD_SIZE", None) == 1


def test_the_shell_of_a_batch_script_is_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank and size are not used: nobody starts the others."""
    set_all(monkeypatch, TASK, SLURM_PROCID="0")
    for name in ("SLURM_STEP_NODELIST", "SLURM_STEP_ID"):
        monkeypatch.delenv(name)
    for name in launch.NAMES:
        with pytest.raises(ValueError, match=rf"{name} in the environment.*start it with srun"):
            find_setting(name)
    assert is_single_host(None, 1)
    assert not is_single_host(None, 8)


def test_the_tasks_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no network, unless the world has other workers too."""
    set_all(monkeypatch, TASK)
    assert not is_single_host(None, 8)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node03")
    assert is_single_host(None, 8)
    assert not is_single_host(None, 9)
    assert not is_single_host("tcp://10.0.0.1:1", 8)
    assert find_setting("MASTER_ADDR").value == "localhost"
    monkeypatch.setenv("WORLD_SIZE", "16")  # of two steps
    assert not is_single_host(None, 16)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert not is_single_host(None, 8)


def test_ports_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that may share a node have different ones, none of them a random port of Linux."""
    set_all(monkeypatch, TASK)
    ports = set()
    for job in range(9990, 10010):
        for step in range(5):
            set_all(monkeypatch, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))
            ports.add(find_number("MASTER_PORT", None))
    assert len(ports) == 100
    assert min(ports) >= 15000
    assert max(ports) < 25000
    monkeypatch.delenv("SLURM_JOB_ID")
    assert find_setting("MASTER_PORT") == ("29500", "default")


def test_what_a_task_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it. What is not needed is not read."""
    set_all(monkeypatch, TASK, SLURM_STEP_NODELIST="node[03")
    with pytest.raises(ValueError, match=r"^SLURM_STEP_NODELIST must be .*'node\[03'; set MASTER"):
        meeting_url(None, 8)
    assert not is_single_host(None, 8)
    assert meeting_url("tcp://a:1", 8) == "tcp://a:1"
    set_all(monkeypatch, MASTER_ADDR="10.0.0.1", MASTER_PORT="1")
    assert meeting_url(None, 8) == "env://"
    monkeypatch.delenv("SLURM_NTASKS")
    with pytest.raises(ValueError, match="WORLD_SIZE in the environment, as srun sets SLURM_NTASK"):
        find_number("WORLD_SIZE", None)


# ── Kubernetes ──────────────────────────────────────────────────────────────────────────────────


def test_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index is its rank; the manifest has the address of rank 0."""
    set_all(monkeypatch, POD, MASTER_ADDR="train-0.workers")
    assert find_number("RANK", None) == 2
    assert meeting_url(None, 8) == "tcp://train-0.workers:29500"


# ── one host ────────────────────────────────────────────────────────────────────────────────────


def test_is_single_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one without a URL, and torchrun's if all its workers are local."""
    assert is_single_host(None, 1)
    assert not is_single_host("tcp://10.0.0.1:1", 1)
    assert not is_single_host(None, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert is_single_host(None, 2)
    assert not is_single_host(None, 4)
    assert not is_single_host("tcp://10.0.0.1:1", 2)


# ── one port, and TLS ───────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("worlds.launchers")
def test_the_port_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the environment counts the workers of a host; a given one is that port."""
    for name in (launch.PORT, "LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert (find_port(None), find_port(7)) == (None, 7)
    set_all(monkeypatch, AIORPC_TORCH_PORT="29600", SLURM_LOCALID="3")
    assert find_port(None) == 29600, "no task of a step"
    set_all(monkeypatch, TASK)
    assert find_port(None) == 29603
    set_all(monkeypatch, LOCAL_RANK="2")
    assert (find_port(None), find_port(7)) == (29602, 7)
    set_all(monkeypatch, AIORPC_TORCH_PORT="x")
    with pytest.raises(ValueError, match="AIORPC_TORCH_PORT must be a number, got 'x'"):
        find_port(None)


@pytest.mark.promise("worlds.launchers")
def test_the_certificate_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in launch.TLS:
        monkeypatch.delenv(name, raising=False)
    assert find_tls(None) is None
    files = Authority(tmp_path).files()
    monkeypatch.setenv(launch.TLS[0], files[0])
    text = "AIORPC_TORCH_TLS_KEY and AIORPC_TORCH_TLS_CA is not set"
    with pytest.raises(ValueError, match=text):
        find_tls(None)
    set_all(monkeypatch, dict(zip(launch.TLS, files, strict=True)))
    assert find_tls(None) == aiorpc.Tls(*files)
