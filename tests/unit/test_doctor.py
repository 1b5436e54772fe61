"""The checks of `python -m aiorpc_torch doctor`: facts, problems, and what to do."""

import resource
import socket
from pathlib import Path

import pytest

from aiorpc_torch import _doctor as doctor
from aiorpc_torch._doctor import Finding
from aiorpc_torch._world import launch
from tests.support.certificates import Authority


def test_a_problem_has_its_remedy_below() -> None:
    """A fact is one line, a problem two."""
    assert str(Finding("CUDA", "no device")) == "ok      CUDA: no device"
    lines = str(Finding("rank 0", "no way", "call somebody")).splitlines()
    assert lines == ["PROBLEM rank 0: no way", "        -> call somebody"]


def test_rank_0_that_listens_and_one_that_does_not() -> None:
    """Both can be reached, so neither is a problem."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
        found = doctor.way_to_rank_0(master)
        assert "this machine) can be reached, and a process listens" in found.text
        assert not found.remedy
    found = doctor.way_to_rank_0(master)
    assert "nothing listens there yet" in found.text
    assert not found.remedy


@pytest.mark.parametrize("master", ["host", "host:", "host:port", ":1", "host:0", "host:65536"])
def test_an_address_that_is_none(master: str) -> None:
    """The remedy names both parts."""
    found = doctor.way_to_rank_0(master)
    assert found.text == f"{master!r} is no address"
    assert "MASTER_PORT" in found.remedy


def test_a_name_without_address() -> None:
    """It is a problem of DNS."""
    found = doctor.way_to_rank_0("name.invalid:29500")
    assert "name.invalid has no address" in found.text
    assert "DNS" in found.remedy


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may be a task or a pod."""
    for name in (*launch.NAMES, "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_launcher")
def test_rank_0_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is torchrun's or Slurm's, if there is one."""
    assert doctor._master_in_environment() is None
    assert "set MASTER_ADDR" in doctor.way_to_rank_0(None).text
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert doctor._master_in_environment() == "10.0.0.1:"
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert doctor._master_in_environment() == "10.0.0.1:29500"


@pytest.mark.usefixtures("no_launcher")
def test_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value has its source, and what is missing its remedy."""
    assert doctor.launcher().text == (
        "none: worker() needs rank=, or RANK in the environment, as torchrun sets it"
    )
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[03-05]")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert doctor.launcher().text == (
        "RANK=3 (SLURM_PROCID); WORLD_SIZE=8 (SLURM_NTASKS); "
        "MASTER_ADDR=node03 (SLURM_STEP_NODELIST); MASTER_PORT=29500"
    )
    assert doctor._master_in_environment() == "node03:29500"
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[")
    assert "; SLURM_STEP_NODELIST must be a list of hosts" in doctor.launcher().text


def test_an_interface_that_is_not_there() -> None:
    """The existing ones are listed."""
    found = doctor.network_interface("nope", None)
    assert "'nope'" in found.text
    assert "127.0.0.1" in found.text
    assert "AIORPC_INTERFACE" in found.remedy
    assert not doctor.network_interface("lo", None).remedy


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy says for which worlds it matters."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 2024))
    assert "more than 26 workers" in doctor.limits().remedy
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    assert not doctor.limits().remedy
    assert doctor.limits().text == "at most 1024, which a world raises as it needs, without a limit"


@pytest.mark.slow
def test_a_transport_that_does_not_exist() -> None:
    """The last line of its process is the text."""
    found = doctor.transport("nope")
    assert "nope" in found.text
    assert "transports=" in found.remedy


def test_one_port_and_its_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the environment says; what cannot be used is a problem."""
    for name in (launch.PORT, *launch.TLS, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert "no certificate in the environment" in doctor.certificate().text
    monkeypatch.setenv(launch.PORT, "29600")
    assert "29600 for this worker (AIORPC_TORCH_PORT)" in doctor.ports().text
    monkeypatch.setenv(launch.PORT, "x")
    assert doctor.ports().remedy
    authority = Authority(tmp_path)
    for tls in (authority.tls(), authority.expired()):
        for name, file in zip(launch.TLS, (tls.cert, tls.key, tls.ca), strict=True):
            monkeypatch.setenv(name, str(file))
        found = doctor.certificate()
        assert ("is valid" if "worker" in str(tls.cert) else "has expired") in found.text
        assert bool(found.remedy) is ("has expired" in found.text)
