"""The network interface through which a worker communicates.

TensorPipe binds to the interface that an environment variable names. Without the variable it binds
to the address of this machine's own name, often 127.0.0.1 or 127.0.1.1. Other machines do not reach
that (seen on torch 2.13 and 2.15, tests/network/test_two_hosts.py). Imports nothing of torch.
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

from .._aio.awaited import blocking_on

VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""torch's variables for an interface. TensorPipe reads the first one."""

_Address = tuple[Any, ...]  # as the socket module has it

_IFF_UP = 0x1
# Reserved for documentation (RFC 5737, RFC 3849): packets to them take the default route.
_UNASSIGNED = ("192.0.2.254", "2001:db8::1")


# ── choosing an interface ───────────────────────────────────────────────────────────────────────


def requested_interface(interface: str | None) -> str | None:
    """Return what is requested by `interface`, else AIORPC_INTERFACE, else torch's variables.

    Raises:
        ValueError: if this machine has no such interface; it lists the existing ones.
    """
    name, source = interface, ""
    for variable in ("AIORPC_INTERFACE", *VARIABLES):
        if not name and (value := os.environ.get(variable)):
            name, source = value.split(",")[0], f", as {variable} says"  # gloo's may be a list
    if not name:
        return None
    if (known := addresses()) and name not in known:
        up = ", ".join(f"{each} ({', '.join(of)})" for each, of in known.items())
        raise ValueError(
            f"no network interface {name!r} is up on this machine{source}: it has {up}"
        )
    return name


def interface_towards(host: str | None) -> str | None:
    """Return the interface that packets to `host` take, or that has its address.

    Return None if `host` is unknown.
    """
    if host is None:
        return None
    if is_loopback_host(host):
        return _loopback()
    source = _source_address(host)
    if source is None and any(is_loopback_host(address[0]) for _, address in _resolve(host)):
        # This machine's own name: it resolves to 127.0.1.1 here, and differently elsewhere.
        source = next(filter(None, map(_source_address, _UNASSIGNED)), None)
    return None if source is None else _interface_with(source)


def loopback_only() -> str:
    """Return the loopback interface, for worlds whose workers are all on this machine."""
    return _loopback() or "lo"


def loopback_address() -> str:
    """Return an address of the loopback interface."""
    return addresses().get(loopback_only(), ["127.0.0.1"])[0]


def describe(interface: str | None) -> str:
    """Return the interface and its addresses as text."""
    if interface is None:
        return f"what {socket.gethostname()!r} resolves to"
    return f"{interface} ({', '.join(addresses().get(interface, ['no address']))})"


def look_up_own_name() -> None:
    """Look up this machine's own name, as TensorPipe does without an interface."""
    _resolve(socket.gethostname())


@contextlib.contextmanager
def interface_env(interface: str | None) -> Iterator[None]:
    """Set the variable for TensorPipe, which reads it at its start."""
    before = os.environ.get(VARIABLES[0])
    if interface is not None:
        os.environ[VARIABLES[0]] = interface
    try:
        yield
    finally:
        os.environ.pop(VARIABLES[0], None)
        if before is not None:
            os.environ[VARIABLES[0]] = before


def listen(host: str | None, port: int) -> socket.socket:
    """Return a socket that listens at this machine's address that `host` names, or at all of them.

    All, if `host` names no address of this machine, or one that other machines do not see. The
    first may be a forwarded port; the second is 127.0.1.1 for this machine's own name.
    """
    own = _own_addresses()
    for family, address in _resolve(host, port) if host else ():
        if is_loopback_host(host or "") if is_loopback_host(address[0]) else address[0] in own:
            return socket.create_server(address, family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def own_address(interface: str | None) -> str | None:
    """Return an address at which other machines reach this one; None if it has none.

    It is one of `interface`, or what this machine's own name resolves to.
    """
    own = _own_addresses()
    if interface is None:
        found = [address[0] for _, address in _resolve(socket.gethostname())]
    else:
        found = addresses().get(interface, [])
    usable = (each for each in found if each in own and not each.startswith("fe80:"))
    return next((each for each in usable if not is_loopback_host(each)), None)


def _own_addresses() -> set[str]:
    return {address for each in addresses().values() for address in each}


def is_loopback_host(host: str) -> bool:
    """Return whether `host` means the local machine, on every machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.partition(".")[0] == "localhost"


# ── existing interfaces ─────────────────────────────────────────────────────────────────────────


class _Entry(ctypes.Structure):
    """`struct ifaddrs` of Linux, its first members."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    )


_OF_FAMILY: dict[int, tuple[int, int]] = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Offset and bytes of the address in a `struct sockaddr`."""


def addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each interface that is up, as TensorPipe reads them."""
    found: dict[str, list[str]] = {}
    libc = ctypes.CDLL(None)
    first = ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return found
    pointer = first.value
    while pointer:
        entry = _Entry.from_address(pointer)
        if entry.flags & _IFF_UP and entry.address:
            family = int.from_bytes(ctypes.string_at(entry.address, 2), sys.byteorder)
            if place := _OF_FAMILY.get(family):
                data = ctypes.string_at(entry.address + place[0], place[1])
                name, address = os.fsdecode(entry.name), socket.inet_ntop(family, data)
                found.setdefault(name, []).append(address)
        pointer = entry.next
    libc.freeifaddrs(first)
    return found


def _interface_with(address: str) -> str | None:
    """Return the interface that has that address."""
    return next((name for name, has in addresses().items() if address in has), None)


def _loopback() -> str | None:
    return _interface_with("127.0.0.1") or _interface_with("::1")


def _source_address(host: str) -> str | None:
    """Return the source address of packets to `host`, None if it is a loopback address."""
    for family, address in _resolve(host):
        with contextlib.suppress(OSError):  # no route
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                source = str(probe.getsockname()[0])
            if not is_loopback_host(source):
                return source
    return None


def has_route(url: str) -> bool:
    """Return whether this machine has a route to the address in `scheme://address:port`.

    Without a route, because a link is down, TensorPipe's connection ends the process:
    `terminate called ... network is unreachable` (2.13 and 2.15).
    """
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        return True  # not an IP address
    for family, address in _resolve(parts.hostname, parts.port):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
        except OSError as exc:
            return exc.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
    return True


def looking_up(host: str) -> AbstractContextManager[None]:
    """Return a context for the lookup of a name, which may block without end."""
    return blocking_on(
        f"the lookup of the name {host!r} does not end: check the name servers (DNS), or give an "
        "IP address"
    )


def _resolve(host: str, port: int = 9) -> list[tuple[int, _Address]]:
    """Return the addresses of `host`, IPv4 first: a machine without IPv6 must reach this one."""
    try:
        with looking_up(host):
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    found: list[tuple[int, _Address]] = [(family, address) for family, _, _, _, address in answers]
    return sorted(found, key=lambda each: each[0] != socket.AF_INET)
