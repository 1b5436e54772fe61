"""The sockets of torch's connections: nothing replaces them."""

import contextlib
import os
import socket
from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

from .._aio.silence import send_again

_DESCRIPTORS = "/proc/self/fd"


def send_again_to(addresses: Iterable[str], own_address: str) -> bool:
    """Let TCP send again soon on torch's connections with peers.

    Otherwise it waits for up to two minutes, also once a link that was cut is whole again. Return
    whether something is sent and not acknowledged.

    Args:
        addresses: those of the peers, as they have told them.
        own_address: the same of this worker.
    """
    peers = {(url.hostname, url.port) for url in map(_split, addresses) if url.port}
    if not peers or not os.path.isdir(_DESCRIPTORS):
        return False
    is_missing = False
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
                    is_missing |= send_again(sock)
    return is_missing


def _split(address: str) -> SplitResult:
    return urlsplit(address if "://" in address else f"//{address}")
