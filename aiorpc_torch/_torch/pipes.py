"""The sockets of torch's connections: nothing replaces them."""

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from urllib.parse import SplitResult, urlsplit

from .._aio.flows import LONGEST_SILENCE, end_when_silent, send_again

_DESCRIPTORS = "/proc/self/fd"


def send_again_to(addresses: Iterable[str], own_address: str) -> bool:
    """Let TCP send again soon on torch's connections with peers.

    Otherwise it waits for up to two minutes, also once a link that was cut is whole again. Return
    whether something is sent and not acknowledged. The addresses are those that the workers tell.
    """
    is_missing = False
    for each, _ in _sockets(addresses, own_address):
        is_missing |= send_again(each)
    return is_missing


def end_once_silent(address: str, own_address: str, seconds: float, others: Iterable[str]) -> bool:
    """Let torch's connections with a process that has ended fail: perhaps its host is gone.

    Return whether there is one to the process.

    Then nothing closes them, and on idle ones TCP asks nothing. Those that the process has opened
    cannot be told from those of `others` on its host: there they fail after the time that TCP has
    by default.
    """
    is_shared = _split(address).hostname in {_split(each).hostname for each in others}
    found = False
    for each, is_to in _sockets([address], own_address):
        found |= is_to
        with contextlib.suppress(OSError):  # it has ended
            end_when_silent(each, LONGEST_SILENCE if is_shared and not is_to else seconds)
    return found


def _sockets(addresses: Iterable[str], own_address: str) -> Iterator[tuple[socket.socket, bool]]:
    """Yield torch's sockets to the peers, and from their hosts; and whether it is to a peer."""
    peers = {(url.hostname, url.port) for url in map(_split, addresses) if url.port}
    if not peers or not os.path.isdir(_DESCRIPTORS):
        return
    hosts, own = {host for host, _ in peers}, _split(own_address)
    for each in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError, ValueError):  # it is closed, or not of TCP
            if not os.readlink(f"{_DESCRIPTORS}/{each}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(each))) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                (host, port), own_port = sock.getpeername()[:2], sock.getsockname()[1]
                if (host, port) in peers or (host in hosts and own_port == own.port):
                    yield sock, (host, port) in peers


def _split(address: str) -> SplitResult:
    return urlsplit(address if "://" in address else f"//{address}")
