"""Hosts on this machine: network namespaces at one bridge."""

import contextlib
import subprocess
from collections.abc import Iterator

LINK = "v0"


def address(host: int) -> str:
    """Return the address of a host, by its number from 0."""
    return f"10.95.7.{host + 1}"


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Make so many network namespaces that reach each other; return a path of each.

    Raises:
        OSError: if `unshare` is missing.
        subprocess.CalledProcessError: if they cannot be made.
    """
    with contextlib.ExitStack() as stack:
        hub, *rest = (stack.enter_context(_keeper()) for _ in range(count + 1))
        _ip(hub, "link", "add", "br0", "type", "bridge")
        _ip(hub, "link", "set", "br0", "up")
        for number, host in enumerate(rest):
            port = f"p{number}"
            veth = ("type", "veth", "peer", "name", LINK, "netns", str(host.pid))
            _ip(hub, "link", "add", port, *veth)
            _ip(hub, "link", "set", port, "master", "br0", "up")
            _ip(host, "address", "add", f"{address(number)}/24", "dev", LINK)
            for device in ("lo", LINK):
                _ip(host, "link", "set", device, "up")
        yield [f"/proc/{host.pid}/ns/net" for host in rest]


Keeper = subprocess.Popen[bytes]


@contextlib.contextmanager
def _keeper() -> Iterator[Keeper]:
    """Keep a network namespace alive in a process of its own."""
    words = ["unshare", "--net", "sh", "-c", "echo in; exec cat"]
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


def _ip(keeper: Keeper, *words: str) -> None:
    inside = ["nsenter", f"--net=/proc/{keeper.pid}/ns/net", "ip", *words]
    subprocess.run(inside, check=True, capture_output=True)
