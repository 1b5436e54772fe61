"""This process's host: its names, which processes compare, and what this process may use of it.

The boot id of Linux tells machines apart, the ids of namespaces tell containers of a machine apart.
"""

import contextlib
import functools
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("aiorpc_torch")


def network_namespace() -> str:
    """Return the name of this network namespace, "" if unknown.

    Processes that share it reach each other's abstract Unix sockets.
    """
    return _name("net")


def this_host() -> str:
    """Return the name of this host and user, "" if unknown.

    Processes that share it can map each other's memory, by /proc, and share their links to others.
    Those of two network namespaces do not: the link of one may be cut alone.
    (tests/network/test_two_hosts.py)
    """
    found = _name("net", "pid", "user")
    return f"{found} {os.getuid()}" if found else ""


def _name(*namespaces: str) -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{each}") for each in namespaces)])
    except OSError:  # not on Linux
        return ""


# ── memory ──────────────────────────────────────────────────────────────────────────────────────

_GROUPS = Path("/proc/self/cgroup")

_CONTROLLERS = {
    "": (Path("/sys/fs/cgroup"), "memory.max"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}
"""Root and file of the limits of version 2 and of version 1."""


@functools.cache
def memory_size() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its groups' limit.

    A container with 8 GB on a machine with 1 TB must not reserve parts of the terabyte.
    (tests/unit/aio/test_memory_size.py)
    """
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits())


def _limits() -> Iterator[int]:
    """Yield the limits of this process's control groups and of those around them."""
    yield 1 << 63
    with contextlib.suppress(OSError):  # not on Linux
        for line in _GROUPS.read_text().splitlines():
            _, names, path = line.split(":", 2)
            for name in _CONTROLLERS.keys() & names.split(","):
                root, file = _CONTROLLERS[name]
                folder = root / path.lstrip("/")
                for each in (folder, *folder.parents):
                    # A group outside of this process's mount has no folder; "max" is no limit.
                    with contextlib.suppress(OSError, ValueError):
                        yield int((each / file).read_text())
                    if each == root:
                        break


# ── open files ──────────────────────────────────────────────────────────────────────────────────

FILES_OF_PEER = 40  # two pipes of torch on another host, and connections (benchmarks.descriptors)
OTHER_FILES = 1024  # of torch, of this library and of the program: the usual limit


def allow_files(peers: int) -> None:
    """Raise the soft limit of open files to what so many peers need, at most to the hard limit.

    torch ends a process that has no files left. The usual soft limit of 1,024 is for programs that
    use `select`, for which files beyond it are an error as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OTHER_FILES + FILES_OF_PEER * peers
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.debug("the limit of open files is %d now, for %d peers", wanted, peers)
