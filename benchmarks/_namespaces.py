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
        keepers = [stack.enter_context(keeper()) for _ in range(count + 1)]
        hub, *rest = [path(each) for each in keepers]
        ip(hub, "link", "add", "br0", "type", "bridge")
        ip(hub, "link", "set", "br0", "up")
        for number, host in enumerate(rest):
            port, pid = f"p{number}", str(keepers[number + 1].pid)
            ip(hub, "link", "add", port, "type", "veth", "peer", "name", LINK, "netns", pid)
            ip(hub, "link", "set", port, "master", "br0", "up")
            ip(host, "address", "add", f"{address(number)}/24", "dev", LINK)
            for device in ("lo", LINK):
                ip(host, "link", "set", device, "up")
        yield rest


@contextlib.contextmanager
def keeper() -> Iterator["subprocess.Popen[bytes]"]:
    """Keep a network namespace alive in a process of its own."""
    words = ["unshare", "--net", "sh", "-c", "echo in; exec cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as found:
        try:
            assert found.stdout is not None
            if not found.stdout.readline():
                assert found.stderr is not None
                raise subprocess.CalledProcessError(1, words, stderr=found.stderr.read())
            yield found
        finally:
            found.kill()


def path(kept: "subprocess.Popen[bytes]") -> str:
    """Return the path of the namespace that a keeper keeps."""
    return f"/proc/{kept.pid}/ns/net"


def ip(namespace: str, *words: str) -> None:
    """Run `ip` in a namespace."""
    inside = ["nsenter", f"--net={namespace}", "ip", *words]
    subprocess.run(inside, check=True, capture_output=True)
