"""A limit on connections whose other end has proven nothing. (tests/unit/port/test_strangers.py)"""

import socket
from collections import Counter
from collections.abc import Callable

LEFT = "this worker has left"
TOO_MANY = "too many unauthenticated connections"


def host_of(connected: socket.socket) -> str:
    """Return the address of the other end of a TCP connection, "?" if it is closed already."""
    try:
        return str(connected.getpeername()[0])
    except OSError:
        return "?"


Close = Callable[[str], object]
"""Closes a connection, for a reason."""


class Strangers:
    """Connections without a proof; beyond `limit` one of the host that has the most is closed.

    Of that host's connections the oldest is closed: a member proves itself within milliseconds, and
    strangers at one host do not close the connections of members at others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: dict[object, tuple[str, Close]] = {}  # oldest first

    def __len__(self) -> int:
        """Return the number of connections."""
        return len(self._all)

    def add(self, key: object, host: str, close: Close) -> None:
        """Add a connection, which `close` closes."""
        while len(self._all) >= self._limit:
            hosts = Counter(each for each, _ in self._all.values())
            busiest = max(hosts, key=hosts.__getitem__)
            oldest = next(key for key, (each, _) in self._all.items() if each == busiest)
            self._all.pop(oldest)[1](TOO_MANY)
        self._all[key] = host, close

    def remove(self, key: object) -> None:
        """Remove a connection that is proven or closed."""
        self._all.pop(key, None)

    def close(self) -> None:
        """Close all of them, since this worker leaves."""
        while self._all:
            self._all.pop(next(iter(self._all)))[1](LEFT)
