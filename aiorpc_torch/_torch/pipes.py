"""The sockets of torch's connections, which torch opens itself and never replaces."""

import contextlib
import os
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from .._aio.silence import retry_soon

_DESCRIPTORS = "/proc/self/fd"


def retry_soon_to(addresses: Iterable[str], own_address: str) -> None:
    """Let TCP try again every second on torch's connections with peers, from its next attempt on.

    Otherwise it waits for up to two minutes, also once a link that was cut is whole again.

    Args:
        addresses: those of the peers, as they have told them: URLs.
        own_address: the same of this worker.
    """
    peers = {(url.hostname, url.port) for url in map(urlsplit, addresses) if url.port}
    if not peers or not os.path.isdir(_DESCRIPTORS):
        return
    hosts, own = {host for host, _ in peers}, urlsplit(own_address)
    for each in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError, ValueError):  # it is closed, or not of TCP
            if not os.readlink(f"{_DESCRIPTORS}/{each}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(each))) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                (host, port), own_port = sock.getpeername()[:2], sock.getsockname()[1]
                if (host, port) in peers or (host in hosts and own_port == own.port):
                    retry_soon(sock)
