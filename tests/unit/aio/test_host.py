"""Names of hosts: equal for processes that reach each other, and for no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiorpc_torch._aio.host import network_namespace, this_host
from tests.support.network_namespaces import why_not
from tests.support.scripts import ROOT

SCRIPT = "from aiorpc_torch._aio.host import *; print(network_namespace()); print(this_host())"


def names(*prefix: str) -> list[str]:
    """Return the names of another process."""
    command = [*prefix, sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_names_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the boot and the namespaces, and `this_host` the user."""
    own = [network_namespace(), this_host()]
    assert names() == own
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert own[0] == f"{boot} {os.readlink('/proc/self/ns/net')}"
    monkeypatch.setattr(os, "getuid", lambda: 1 << 30)
    assert this_host() != own[1]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason="makes namespaces, as root on Linux")
def test_other_namespaces() -> None:
    """Memory is mapped in one PID namespace; links are those of one network namespace."""
    namespace, host = network_namespace(), this_host()
    other_namespace, other_host = names("unshare", "--net")
    assert namespace != other_namespace
    assert host != other_host
    same_namespace, other_host = names("unshare", "--pid", "--fork", "--mount-proc")
    assert namespace == same_namespace
    assert host != other_host


def test_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", fail)
    assert network_namespace() == this_host() == ""
