"""Hosts on this machine: namespaces for network, processes and IPC, with cables between them.

Needs root on Linux. Processes of two hosts share no memory; those of one host do, as on real ones.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LINK = "v0"
"""Name of a host's network interface."""

NETWORK = "10.94.7."
NETWORK_6 = "fd94:7::"

LOOP = 'until "$@"; do sleep 0.1; done'
"""A supervisor: the words that follow are started again until they succeed."""

HERE = Path(__file__).parents[1]
"""Root of this checkout."""

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",  # torch's `init_rpc` warns of torch's own calls
    "TP_SOCKET_IFNAME": LINK,
    "GLOO_SOCKET_IFNAME": LINK,
    "PYTHONPATH": str(HERE),  # `nsenter` leaves the working directory
}


class Host:
    """A host that ends with the block that made it.

    Args:
        number: its number, from 1 on.
        keeper: the process that made its namespaces.
        is_ipv6: whether it has IPv6 addresses alone.
    """

    def __init__(
        self, number: int, keeper: "subprocess.Popen[bytes]", *, is_ipv6: bool = False
    ) -> None:
        self.address = f"{NETWORK_6 if is_ipv6 else NETWORK}{number}"
        self.keeper = keeper.pid
        self.is_ipv6 = is_ipv6

    def inside(self, *words: str) -> list[str]:
        """Return a command that runs another one on this host."""
        spaces = {"net": "net", "pid": "pid_for_children", "ipc": "ipc", "mount": "mnt"}
        enter = [f"--{kind}=/proc/{self.keeper}/ns/{file}" for kind, file in spaces.items()]
        return ["nsenter", *enter, *words]

    @property
    def network(self) -> str:
        """Return the path of its network namespace."""
        return f"/proc/{self.keeper}/ns/net"

    def run(self, *words: str) -> None:
        """Run a command on this host.

        Raises:
            subprocess.CalledProcessError: if it fails.
        """
        subprocess.run(self.inside(*words), check=True, capture_output=True)

    def start(
        self, module: str, *words: str, source: Path = HERE, **options: Any
    ) -> "subprocess.Popen[str]":
        """Start a Python module of a checkout, this one or another, on this host."""
        command = self.inside(sys.executable, "-m", module, *words)
        env = os.environ | _ENVIRONMENT | {"PYTHONPATH": str(source)}
        return subprocess.Popen(command, text=True, env=env, **options)

    def loop(self, module: str, *words: str, **options: Any) -> "subprocess.Popen[str]":
        """Start a Python module on this host, again whenever it fails."""
        command = self.inside("sh", "-c", LOOP, "sh", sys.executable, "-m", module, *words)
        return subprocess.Popen(command, text=True, env=os.environ | _ENVIRONMENT, **options)

    def shape(self, *words: str) -> None:
        """Shape what this host sends, as `tc qdisc replace dev LINK root` does."""
        self.run("tc", "qdisc", "replace", "dev", LINK, "root", *words)

    def unshape(self) -> None:
        """Send at full speed again."""
        self.run("tc", "qdisc", "del", "dev", LINK, "root")

    def set_up(self) -> None:
        """Give it its address, and let its interfaces be up."""
        self._change_address("add")
        for device in ("lo", LINK):
            self.run("ip", "link", "set", device, "up")
        if self.is_ipv6:
            self.run("ip", "address", "del", "127.0.0.1/8", "dev", "lo")
            keep = "echo 1 >/proc/sys/net/ipv6/conf/all/keep_addr_on_down"
            self.run("sh", "-c", keep)

    def move(self, address: str) -> None:
        """Give it another address."""
        self._change_address("del")
        self.address = address
        self._change_address("add")

    def _change_address(self, verb: str) -> None:
        at_once = ["nodad"] if self.is_ipv6 and verb == "add" else []
        length = 64 if self.is_ipv6 else 24
        self.run("ip", "address", verb, f"{self.address}/{length}", "dev", LINK, *at_once)

    @contextlib.contextmanager
    def without_packets(self) -> Iterator[None]:
        """Drop all packets to and from other hosts, as a cut between two switches does."""
        ways = ["OUTPUT", "-o", LINK], ["INPUT", "-i", LINK]
        for way in ways:
            self.run("iptables", "-A", *way, "-j", "DROP")
        try:
            yield
        finally:
            for way in ways:
                self.run("iptables", "-D", *way, "-j", "DROP")

    def plug(self, *, is_up: bool) -> None:
        """Cut or mend the cable of this host."""
        self.run("ip", "link", "set", LINK, "up" if is_up else "down")


@contextlib.contextmanager
def hosts(count: int = 2, *, is_ipv6: bool = False) -> Iterator[list[Host]]:
    """Make hosts: two with a cable between them, or more at a switch.

    Args:
        count: number of hosts (default: 2).
        is_ipv6: whether they have IPv6 addresses alone (default: IPv4).

    Raises:
        OSError: if `unshare` is missing.
        subprocess.CalledProcessError: if they cannot be made.
    """
    with contextlib.ExitStack() as stack:
        found = [
            Host(each + 1, stack.enter_context(_keeper()), is_ipv6=is_ipv6) for each in range(count)
        ]
        if count == 2:
            _connect(found[0], LINK, found[1])
        else:
            switch = Host(0, stack.enter_context(_keeper()))
            switch.run("ip", "link", "add", "switch", "type", "bridge")
            switch.run("ip", "link", "set", "switch", "up")
            for number, host in enumerate(found):
                port = f"p{number}"
                _connect(switch, port, host)
                switch.run("ip", "link", "set", port, "master", "switch", "up")
        for host in found:
            host.set_up()
        yield found


def _connect(one: Host, name: str, other: Host) -> None:
    far: Sequence[str] = ("type", "veth", "peer", "name", LINK, "netns", str(other.keeper))
    # From this process's namespace for processes, in which the number of the other one counts.
    enter = ["nsenter", f"--net={one.network}"]
    subprocess.run([*enter, "ip", "link", "add", name, *far], check=True, capture_output=True)


@contextlib.contextmanager
def _keeper() -> Iterator["subprocess.Popen[bytes]"]:
    """Keep the namespaces of a host alive in a process of its own, and all that runs there."""
    words = ["unshare", "--net", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    words += ["sh", "-c", "echo in; exec cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as keeper:
        try:
            assert keeper.stdout is not None
            if not keeper.stdout.readline():
                assert keeper.stderr is not None
                raise subprocess.CalledProcessError(1, words, stderr=keeper.stderr.read())
            yield keeper
        finally:
            keeper.kill()
