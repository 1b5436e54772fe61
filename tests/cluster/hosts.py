"""Hosts on this machine: each has a network, a host name, processes and /etc/hosts of its own.

A host lives as long as a process of its own. All processes of a host end with that one, also those
that have left their session or their parent. Only root may make hosts.
"""

import contextlib
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network_namespaces import LINK, PATIENCE, Machine

ADDRESSES = ("10.0.0.1", "10.0.0.2")  # those of docs/guides/torchrun.md
NAMES = ("node0", "node1")
NAMESPACES = ("--net", "--uts", "--mount", "--pid")
ISOLATED = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]


@functools.cache
def why_not() -> str | None:
    """Return why this machine cannot make hosts, or None."""
    words = [*ISOLATED, "ip", "link", "add", LINK, "type", "veth", "peer", "name", "v1"]
    try:
        tried = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except OSError as exc:
        return str(exc)
    return tried.stderr.strip() or None


class Host(Machine):
    """A machine of which processes see nothing but their own host."""

    def __init__(self, name: str, table: Path) -> None:
        self.name = name
        self.prefix = ()
        self._keeper = subprocess.Popen(
            [*ISOLATED, "sh", "-c", KEEPER, "sh", name, str(table)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"in\n"
        self.ip("link", "set", "lo", "up")

    def inside(self, *command: str, cwd: Path = Path("/")) -> list[str]:
        """Return the command that runs this one on the host, in that folder."""
        spaces = f"/proc/{self.pid}/ns"
        # The keeper itself is outside of the host's process namespace, its child is inside.
        entered = [f"--pid={spaces}/pid_for_children"]
        entered += [f"--{each}={spaces}/{file}" for each, file in ENTERED]
        return ["nsenter", *entered, f"--wdns={cwd}", "--", *command]

    def run(self, *command: str) -> str:
        """Run a command on the host, and return what it prints."""
        done = subprocess.run(
            self.inside(*command), capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def kill(self, pid: int) -> None:
        """End a process as `kill -9` does; `pid` is its number on the host."""
        self.run("kill", "-9", str(pid))


ENTERED = (("net", "net"), ("uts", "uts"), ("mount", "mnt"))
# The shell stays as the first process of the host, which has to wait for orphans.
KEEPER = """\
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
echo in
cat
"""


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a cable between them, which know each other by name."""
    if reason := why_not():
        pytest.skip(f"no hosts can be made here: {reason}")
    table = folder / "hosts"
    known = zip(ADDRESSES, NAMES, strict=True)
    table.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for at, name in known))
    with contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(contextlib.closing(Host(name, table))) for name in NAMES)
        # By a command that sees the processes of this machine: the keeper of the other one.
        cable = ("ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK)
        subprocess.run(
            Machine.inside(one, *cable, "netns", str(other.pid)), check=True, timeout=PATIENCE
        )
        for host, address in zip((one, other), ADDRESSES, strict=True):
            host.gets(f"{address}/24")
        yield one, other
