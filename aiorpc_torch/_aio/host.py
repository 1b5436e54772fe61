"""Names of this process's host, which processes compare instead of trying to reach each other.

The boot id of Linux tells machines apart, the ids of namespaces tell containers of a machine apart.
"""

import os


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
