"""The path of a TCP connection: does what is sent arrive? The kernel of this machine knows.

The kernel of the other machine acknowledges what arrives, also for a process that is frozen or does
not read. So silence is of the path: a router has forgotten the connection, a firewall drops it, the
link is cut, or large packets do not pass. `TCP_USER_TIMEOUT` is no remedy: with 1 s it ended, after
1.5 s, a connection to a live process that merely did not read. Nor are probes of TCP, which come
once a second at most: on a poor line one is soon lost. (tests/unit/aio/test_flows.py)
"""

import socket
import struct
from typing import NamedTuple

_TCP_INFO = struct.Struct("=16xI4xI28xI60xQ16xI80xI")  # the start of Linux's `struct tcp_info`
_NEEDED = 128  # bytes of it: older systems have no more


class FlowInfo(NamedTuple):
    """The state of a TCP connection, in the kernel's counters."""

    is_missing: bool
    """Whether bytes are sent and not acknowledged, or not sent although the other end has room: a
    firewall of this machine drops them."""
    unheard: float
    """Seconds since the last acknowledgement."""
    acknowledged: int
    """Bytes that have arrived."""


def read_flow(sock: socket.socket) -> FlowInfo | None:
    """Return the state of a TCP connection. None if it is closed, or if the system has none."""
    if (option := getattr(socket, "TCP_INFO", None)) is None:
        return None
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO.size)
    except OSError:
        return None
    if len(data) < _NEEDED:
        return None
    found = _TCP_INFO.unpack(data.ljust(_TCP_INFO.size, b"\0"))
    packet, unacknowledged, unheard, acknowledged, unsent, room = found
    is_missing = unacknowledged > 0 or 0 < min(unsent, packet) <= room
    return FlowInfo(is_missing, unheard / 1000, acknowledged)


class Flow:
    """The progress of one TCP connection, looked at from time to time."""

    def __init__(self) -> None:
        self._acknowledged = 0
        self._since: float | None = None  # time of the first look at missing bytes

    def silence(self, info: FlowInfo, now: float) -> float:
        """Return the seconds for which bytes are missing that were sent, 0 if none is.

        What has arrived of the bytes behind them does not count: on a path that drops large
        packets, small ones arrive.
        """
        if not info.is_missing:
            self._since = None
            return 0.0
        if self._since is None or info.acknowledged != self._acknowledged:
            self._acknowledged, self._since = info.acknowledged, now
        return now - self._since
