"""A Slurm of two nodes on this machine: slurmctld, two slurmd and munged, each node a host.

All files are in one folder, and all ports are those of the hosts. So it disturbs no other Slurm.
"""

import contextlib
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import ADDRESSES, NAMES, Host, two_hosts
from tests.cluster.programs import PATIENCE, Running, environment

PROGRAMS = (
    "slurmctld",
    "slurmd",
    "munged",
    "srun",
    "salloc",
    "sbatch",
    "squeue",
    "sinfo",
    "scancel",
)
START = 60.0  # seconds for the daemons to start, and for a job to be gone
POLL = 0.1  # seconds between two questions to slurmctld
CPUS = 8  # of each node; the guide's script asks for all of them

# The plugins are those that need no cgroups, which a machine without systemd may lack.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={names[0]}({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
NodeName={names[0]} NodeAddr={addresses[0]} CPUs={cpus} State=UNKNOWN
NodeName={names[1]} NodeAddr={addresses[1]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={folder}/cgroup\n"


class Slurm:
    """A Slurm that runs, and its commands on the first node."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.environment = environment(SLURM_CONF=str(folder / "slurm.conf"))

    def daemon(self, host: Host, *command: str) -> None:
        """Start a daemon on a host, whose end ends it."""
        with open(self.folder / f"{command[0]}-{host.name}.out", "wb") as output:
            self.daemons.append(
                subprocess.Popen(
                    host.inside(*command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self.environment,
                )
            )

    def ask(self, *command: str) -> str:
        """Return what a command of Slurm prints, or its error."""
        done = subprocess.run(
            self.hosts[0].inside(*command),
            capture_output=True,
            text=True,
            timeout=START,
            env=self.environment,
            check=False,
        )
        return done.stderr.strip() if done.returncode else done.stdout.strip()

    def start(self, *command: str, cwd: Path) -> Running:
        """Start a command on the first node, whose lines are read as they come."""
        return Running(self.hosts[0].inside(*command, cwd=cwd), cwd=cwd, env=self.environment)

    def wait(self, question: Sequence[str], answer: str, timeout: float = START) -> None:
        """Wait until a command of Slurm prints this."""
        end = time.monotonic() + timeout
        while (found := self.ask(*question)) != answer:
            if time.monotonic() > end or any(each.poll() is not None for each in self.daemons):
                pytest.fail(f"{question} says {found!r}, not {answer!r}:\n{self.logs()}")
            time.sleep(POLL)

    def exit_code(self, job: str) -> int:
        """Wait until a job has ended, and return the exit code of its script."""
        self.wait(("squeue", "--noheader", f"--jobs={job}"), "", PATIENCE)
        found = re.search(r"ExitCode=(\d+):", self.ask("scontrol", "show", "job", job))
        assert found is not None, job
        return int(found[1])

    def clear(self) -> None:
        """Cancel all jobs, and wait until they are gone from the nodes."""
        if self.ask("squeue", "--noheader"):
            self.ask("scancel", "--signal=KILL", "--full", "--user=root")
            self.ask("scancel", "--user=root")
        self.wait(("squeue", "--noheader"), "")

    def logs(self) -> str:
        """Return the ends of what the daemons have written."""
        files = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"{each.name}: {each.read_text()[-2000:]}" for each in files)


def missing() -> list[str]:
    """Return the programs of Slurm and munge that this machine lacks."""
    path = environment()["PATH"]
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Start Slurm, and end all of its processes and all that it has started."""
    if lacking := missing():
        pytest.skip(f"no {', '.join(lacking)}: apt-get install slurm-wlm munge")
    (folder / "state").mkdir()
    (folder / "cgroup").mkdir()
    values = {"folder": folder, "names": NAMES, "addresses": ADDRESSES, "cpus": CPUS}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
    (folder / "cgroup.conf").write_text(CGROUPS.format(**values))
    key = folder / "munge.key"
    key.touch(0o400)
    key.write_bytes(secrets.token_bytes(1024))
    with contextlib.ExitStack() as ended:
        with two_hosts(folder) as hosts:
            slurm = Slurm(hosts, folder)
            ended.callback(lambda: [each.wait(START) for each in slurm.daemons])
            files = [
                f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")
            ]
            socket = f"--socket={folder}/munge.socket"
            slurm.daemon(hosts[0], "munged", "--foreground", "--force", socket, *files)
            slurm.wait(("munge", "--no-input", "--output=/dev/null", socket), "")
            slurm.daemon(hosts[0], "slurmctld", "-D")
            for host in hosts:
                slurm.daemon(host, "slurmd", "-D", "-N", host.name)
            slurm.wait(("sinfo", "--noheader", "--format=%t"), "idle")
            yield slurm
