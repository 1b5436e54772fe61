"""Through which of this machine's network interfaces a world speaks.

gloo and TensorPipe bind to the interface that a variable of the environment names. Without it they
bind to what this machine's own name resolves to, on many machines 127.0.0.1 or 127.0.1.1, where no
other machine finds them (seen on torch 2.13 and 2.15, tests/test_network.py). Knows the operating
system's interfaces and the names of those variables, nothing else of torch.
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

Choice = Mapping[str, str]
"""What the variables are to say; empty: torch chooses."""

_Address = tuple[Any, ...]  # as the socket module has it

_LOOK = 0.05  # seconds between two looks whether somebody listens
_UP = 0x1  # IFF_UP, of Linux and of BSD
# For documentation (RFC 5737, RFC 3849): nobody has them, so they lie where the default route goes.
_ANYWHERE = ("192.0.2.254", "2001:db8::1")


# ── what is chosen ──────────────────────────────────────────────────────────────────────────────


def asked(interface: str | None) -> Choice:
    """What the argument or the environment asks for, in this order: `interface`, AIORPC_INTERFACE,
    the variables themselves.

    Raises:
        ValueError: if this machine has no such interface; it lists those that there are.
    """
    if name := interface or os.environ.get("AIORPC_INTERFACE"):
        choice = dict.fromkeys(VARIABLES, name)
    else:
        choice = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
        for first in [value.split(",")[0] for value in choice.values()]:  # gloo's may be a list
            choice = dict.fromkeys(VARIABLES, first) | choice
    _check(choice)
    return choice


def found(host: str | None) -> Choice:
    """What leads to the rank 0 at `host`; nothing, if it is unknown where that is."""
    name = None if host is None else _towards(host)
    return {} if name is None else dict.fromkeys(VARIABLES, name)


def only_here() -> Choice:
    """The loopback interface, unless the environment says otherwise."""
    name = _loopback() or "lo"
    return {each: os.environ.get(each, name) for each in VARIABLES}


def in_words(choice: Choice) -> str:
    """For people: the interfaces and their addresses."""
    there = addresses()
    names = {name for value in choice.values() for name in value.split(",")}
    words = [f"{name} ({', '.join(there.get(name, ['no address']))})" for name in sorted(names)]
    return " and ".join(words) or f"what {socket.gethostname()!r} resolves to"


@contextlib.contextmanager
def bound(choice: Choice) -> Iterator[None]:
    """Let gloo and TensorPipe, which start inside, bind accordingly."""
    before = {name: os.environ.get(name) for name in choice}
    os.environ.update(choice)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def listener(host: str | None, port: int) -> int | None:
    """The descriptor of a socket bound to the address of this machine that `host` names.

    None if it names none (a forwarded port, say), or one that is not what others see: what this
    machine knows as 127.0.1.1 is elsewhere something else.
    """
    if host is None:
        return None
    mine = {address for each in addresses().values() for address in each}
    for family, address in _resolved(host, port):
        if is_here(host) if is_here(address[0]) else address[0] in mine:
            with contextlib.suppress(OSError):  # in use, maybe by this process: torch will see
                return _bound_socket(family, address)
    return None


def _bound_socket(family: int, address: _Address) -> int:
    with socket.socket(family, socket.SOCK_STREAM) as bare:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bare.bind(address)
        return bare.detach()


def await_listener(host: str, port: int, seconds: float, left: threading.Event) -> OSError | None:
    """Blocks until somebody listens there; why not, if that took too long or `left` was set.

    torch's own wait is up to twice as long as it was told, and prints the frames of each attempt
    (seen on 2.13 and 2.15).
    """
    end = time.monotonic() + seconds
    while True:
        try:
            # A SYN that is lost comes again after one second, the next after three.
            patience = max(0.01, min(2.0, end - time.monotonic()))
            socket.create_connection((host, port), patience).close()
            return None
        except OSError as exc:
            if time.monotonic() > end or left.wait(_LOOK):
                return exc


def is_here(host: str) -> bool:
    """Whether `host` means the machine that says it, whichever that is."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.partition(".")[0] == "localhost"


# ── what there is ───────────────────────────────────────────────────────────────────────────────


class _Entry(ctypes.Structure):
    """`struct ifaddrs`, as far as Linux and BSD agree."""


_Entries = ctypes.POINTER(_Entry)
_Entry._fields_ = [
    ("next", _Entries),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def addresses() -> dict[str, list[str]]:
    """The IP addresses of each interface that is up, as gloo and TensorPipe read them."""
    found: dict[str, list[str]] = {}
    libc = ctypes.CDLL(None)
    first = _Entries()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return found
    entry = first
    while entry:
        here = entry.contents
        if here.flags & _UP and (address := _address(here.address)):
            found.setdefault(os.fsdecode(here.name), []).append(address)
        entry = here.next
    libc.freeifaddrs(first)
    return found


def _address(where: int | None) -> str | None:
    if not where:
        return None
    # Linux has a family of two bytes, BSD a length and a family of one byte.
    head = ctypes.string_at(where, 2)
    match int.from_bytes(head, sys.byteorder) if sys.platform == "linux" else head[1]:
        case socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, ctypes.string_at(where + 4, 4))
        case socket.AF_INET6:
            return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(where + 8, 16))
    return None


def _check(choice: Choice) -> None:
    there = addresses()
    for variable, value in choice.items():
        for name in value.split(","):
            if there and name not in there:
                known = ", ".join(f"{each} ({', '.join(of)})" for each, of in there.items())
                source = "" if len({*choice.values()}) == 1 else f", as {variable} says"
                raise ValueError(
                    f"no network interface {name!r} is up here{source}: there are {known}"
                )


def _holder(address: str) -> str | None:
    """The interface that has that address."""
    return next((name for name, has in addresses().items() if address in has), None)


def _loopback() -> str | None:
    return _holder("127.0.0.1") or _holder("::1")


def _towards(host: str) -> str | None:
    """The interface through which packets to `host` go, or that has its address."""
    if is_here(host):
        return _loopback()
    source = _source(host)
    if source is None and any(is_here(address[0]) for _, address in _resolved(host)):
        # This machine's name, which it knows as 127.0.1.1 and others as something else.
        source = next(filter(None, map(_source, _ANYWHERE)), None)
    return None if source is None else _holder(source)


def _source(host: str) -> str | None:
    """This machine's address in a packet to `host`, if that leaves it or comes back to it."""
    for family, address in _resolved(host):
        with contextlib.suppress(OSError):  # no route
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                source = str(probe.getsockname()[0])
            if not is_here(source):
                return source
    return None


def has_way(url: str) -> bool:
    """Whether packets may go from here to the address in `scheme://address:port`.

    A connection where there is no way, since this machine's own link is down, ends the process:
    `terminate called ... network is unreachable`, from TensorPipe (2.13 and 2.15).
    """
    where = urlsplit(url)
    if where.hostname is None or where.port is None:
        return True  # it is none of IP's
    for family, address in _resolved(where.hostname, where.port):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
        except OSError as exc:
            return exc.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
    return True


def _resolved(host: str, port: int = 9) -> list[tuple[int, _Address]]:
    """The addresses of `host`, those of IPv4 first."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    each: list[tuple[int, _Address]] = [(family, address) for family, _, _, _, address in answers]
    return sorted(each, key=lambda one: one[0] != socket.AF_INET)
