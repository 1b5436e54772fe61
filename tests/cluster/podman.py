"""Containers of podman on a host of their own: they, their networks and their rules end with it.

A container has no image: its root is an empty folder, in which the folders of this machine with its
programs, this Python and the library can be read.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, two_hosts
from tests.cluster.programs import PATIENCE, Running, environment
from tests.support.scripts import ROOT

PROGRAMS = ("podman", "runc", "iptables")
NETWORK = "workers"
FOLDERS = ("dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp")
FILES = ("group", "ld.so.cache", "nsswitch.conf", "passwd")
LINKS = ("bin", "lib", "lib64", "sbin")  # as Debian has them
READ = {"/usr", sys.base_prefix, sys.prefix, str(ROOT), *filter(os.path.isdir, sys.path)}
CGROUPS = "/sys/fs/cgroup/*/libpod_parent"  # without containers they are empty
FEW = 20_000  # files and processes, since a machine without CAP_SYS_RESOURCE cannot raise limits


class Podman:
    """A podman, and the containers that it has started."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host = host
        self.folder = folder
        kept = {"root": "root", "runroot": "run", "tmpdir": "tmp", "network-config-dir": "net"}
        self._words = ["podman", *(f"--{name}={folder / file}" for name, file in kept.items())]
        self._words += ["--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=none"]
        self._roots = 0

    def ask(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run podman to its end."""
        return subprocess.run(
            self.host.inside(*self._words, *words),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=environment(),
            check=False,
        )

    def do(self, *words: str) -> str:
        """Run podman to its end, and return what it prints."""
        done = self.ask(*words)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def new(self, folder: Path, *command: str, options: Sequence[str], **more: str) -> list[str]:
        """Return the words of podman that run a command in a container, in that folder."""
        self._roots += 1
        root = self.folder / f"root-{self._roots}"
        for each in FOLDERS:
            (root / each).mkdir(parents=True)
        for each in LINKS:
            (root / each).symlink_to(f"usr/{each}")
        for each in FILES:
            shutil.copy(f"/etc/{each}", root / "etc" / each)
        limits = {
            name: min(FEW, resource.getrlimit(kind)[1] % (1 << 63))
            for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC))
        }
        settings = {
            name: value
            for name, value in environment(**more).items()
            if name in {"PATH", "PYTHONPATH", "OMP_NUM_THREADS", *more}
        }
        return [
            *(f"--volume={each}:{each}:ro" for each in sorted(READ)),
            *(f"--volume={folder}:{folder}", f"--workdir={folder}"),
            *(f"--ulimit={name}={limit}:{limit}" for name, limit in limits.items()),
            *(f"--env={name}={value}" for name, value in settings.items()),
            *options,
            *("--rootfs", str(root), *command),
        ]

    def start(self, *words: str, cwd: Path) -> Running:
        """Start podman, whose lines are read as they come."""
        return Running(self.host.inside(*self._words, *words), cwd=cwd, env=environment())

    def pid(self, name: str) -> int:
        """Return the first process of a container, by its number on the host."""
        (found,) = json.loads(self.do("inspect", name))
        return int(found["State"]["Pid"])

    def clear(self) -> None:
        """End all containers."""
        self.do("rm", "--force", "--all", "--time=0")


@contextlib.contextmanager
def running_podman(folder: Path) -> Iterator[Podman]:
    """Make a podman with a network whose containers know each other by name."""
    if lacking := [each for each in PROGRAMS if not shutil.which(each, path=environment()["PATH"])]:
        pytest.skip(f"no {', '.join(lacking)}: tests/cluster/install says what to install")
    with two_hosts(folder) as (host, _):
        podman = Podman(host, folder)
        words = podman.new(folder, "true", options=(f"--network={NETWORK}", "--rm"))
        for trial in (("network", "create", NETWORK), ("run", *words)):
            if (tried := podman.ask(*trial)).returncode:
                pytest.skip(f"no containers here: {tried.stderr.strip()}")
        try:
            yield podman
        finally:
            podman.clear()
            host.run("sh", "-c", f"rmdir {CGROUPS}/conmon {CGROUPS} 2>/dev/null || true")
