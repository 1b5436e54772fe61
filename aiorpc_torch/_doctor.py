"""Checks of this machine and its environment: `python -m aiorpc_torch doctor`.

Each check returns a finding; `run_checks` prints them. A finding that is a problem has a remedy.
"""

import contextlib
import functools
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ._aio.host import FILES_OF_PEER, OTHER_FILES
from ._children.local import local_world
from ._client.api import call
from ._port import network
from ._torch.compat import SUPPORTED
from ._version import __version__
from ._world import launch

TRANSPORTS = ("uv", "shm")
TRIAL_TIMEOUT = 120.0  # seconds for a world of two, two starts of Python included
CONNECT_TIMEOUT = 2.0  # seconds
FEW_FILES = 4096  # the hard limit of some containers: for 77 workers on several hosts


class Finding(NamedTuple):
    """The result of one check: a fact, or a problem if there is a `remedy`."""

    topic: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{'PROBLEM' if self.remedy else 'ok':8}{self.topic}: {self.text}"
        return f"{line}\n{'':8}-> {self.remedy}" if self.remedy else line


def run_checks(master: str | None = None, interface: str | None = None) -> int:
    """Print the findings of all checks; return the number of problems.

    Args:
        master: "host:port" of rank 0 (default: the one of the environment, if there is one).
        interface: network interface to use, as for `worker` (default: the one towards rank 0).
    """
    address = master or _master_in_environment()
    checks: list[Callable[[], Finding]] = [
        versions,
        limits,
        launcher,
        functools.partial(network_interface, interface, address),
        functools.partial(way_to_rank_0, address),
        ports,
        certificate,
        devices,
        *(functools.partial(transport, each) for each in TRANSPORTS),
    ]
    problems = 0
    for check in checks:
        print(finding := check(), flush=True)
        problems += bool(finding.remedy)
    print(f"{problems} problem{'s' * (problems != 1)}")
    return problems


def _master_in_environment() -> str | None:
    try:
        host = launch.find_setting("MASTER_ADDR").value
    except ValueError:
        return None
    with contextlib.suppress(ValueError):
        return f"{host}:{launch.find_setting('MASTER_PORT').value}"
    return f"{host}:"


def versions() -> Finding:
    """Return the versions of this library, torch and Python."""
    found = (
        f"aiorpc_torch {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    return Finding("versions", f"{found} (torch {SUPPORTED} is supported)")


def limits() -> Finding:
    """Return the number of files that this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= hard < FEW_FILES
    enough_for = max(hard - OTHER_FILES, 0) // FILES_OF_PEER + 1
    remedy = f"raise the hard limit for worlds of more than {enough_for} workers on several hosts"
    most = "without a limit" if hard == resource.RLIM_INFINITY else f"up to {hard}"
    text = f"at most {soft}, which a world raises as it needs, {most}"
    return Finding("open files", text, f"{remedy}: ulimit -Hn 65536" if few else "")


def launcher() -> Finding:
    """Return what the environment says of this process, and which variables say so."""
    found, missing = [], []
    for name in launch.NAMES:
        try:
            value, source = launch.find_setting(name)
        except ValueError as exc:
            missing.append(str(exc))
        else:
            found.append(f"{name}={value}" if source == name else f"{name}={value} ({source})")
    # worker() may get by argument what is missing, so that is no problem.
    return Finding("launcher", "; ".join(found + missing) if found else f"none: {missing[0]}")


def network_interface(interface: str | None, master: str | None) -> Finding:
    """Return the interface that a world uses."""
    try:
        found = network.requested_interface(interface)
    except ValueError as exc:
        return Finding("interface", str(exc), "set interface= or AIORPC_INTERFACE to one of these")
    host = None if master is None else master.rpartition(":")[0]
    found = found or network.interface_towards(host)
    text = network.describe(found) if found else "the one towards rank 0, once it is known"
    return Finding("interface", text)


def way_to_rank_0(master: str | None) -> Finding:
    """Return whether rank 0's address can be used from here."""
    topic = "rank 0"
    if master is None:
        return Finding(topic, "no address in the environment: set MASTER_ADDR, or give --master")
    host, _, port = master.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        return Finding(topic, f"{master!r} is no address", "give host:port, or set MASTER_PORT too")
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, int(port))}
    except OSError as exc:
        return Finding(topic, f"{host} has no address ({exc})", "use an IP address, or mend DNS")
    own = {address for each in network.addresses().values() for address in each}
    where = "this machine" if own & addresses else "another machine"
    name = f"{master} ({where})"
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
    except ConnectionRefusedError:
        return Finding(topic, f"{name} can be reached; nothing listens there yet")
    except OSError as exc:
        remedy = "check the address, the route (interface=) and the firewall between the machines"
        return Finding(topic, f"no way to {name}: {exc}", remedy)
    return Finding(topic, f"{name} can be reached, and a process listens there")


def ports() -> Finding:
    """Return the ports that workers of several machines use."""
    try:
        port = launch.find_port(None)
    except ValueError as exc:
        return Finding("ports", str(exc), "give the number of a port")
    if port is not None:
        return Finding("ports", f"rank 0's, and {port} for this worker ({launch.PORT})")
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = path.read_text().split() if path.exists() else ("32768", "60999")
    text = f"rank 0's, and {first} to {last} between all machines; none within one machine"
    return Finding("ports", text)


def certificate() -> Finding:
    """Return whether the certificate that the environment names is valid."""
    try:
        found = launch.find_tls(None)
        if found is None:
            return Finding("TLS", f"no certificate in the environment ({launch.TLS[0]})")
        found.check()
    except ValueError as exc:
        return Finding("TLS", str(exc), f"check the files in {', '.join(launch.TLS)}")
    return Finding("TLS", f"the certificate in {found.cert} is valid until {found.expiry}")


def devices() -> Finding:
    """Return the CUDA devices."""
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return Finding("CUDA", f"{names} (device_maps= or 'auto')" if count else "no device")


def transport(name: str) -> Finding:
    """Return whether a world of two processes works with one of torch's transports."""
    # In a process of its own: a transport that does not work may end the process.
    run = f"asyncio.run(try_transport({name!r}))"
    code = f"import asyncio; from {__name__} import try_transport; {run}"
    topic = f"transport {name}"
    remedy = f"leave {name!r} out of transports=, and report this text"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=TRIAL_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(topic, f"no answer within {TRIAL_TIMEOUT:g} s", remedy)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding(topic, last, remedy)
    return Finding(topic, done.stdout.strip())


async def try_transport(name: str) -> None:
    """Print how long a small and a large call take in a world with that transport."""
    small, large = torch.zeros(1), torch.zeros(1 << 22)
    async with local_world(1, transports=[name]):
        await call(1, echo, large)  # opens the connections
        times = []
        for tensor in (small, large):
            start = time.perf_counter()
            await call(1, echo, tensor)
            times.append((time.perf_counter() - start) * 1e3)
    print(f"a call takes {times[0]:.2f} ms, one with 16 MB there and back {times[1]:.0f}")


async def echo(tensor: Tensor) -> Tensor:
    """Return `tensor`."""
    return tensor
