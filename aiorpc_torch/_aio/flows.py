"""The path of a TCP connection: does what is sent arrive? And time limits if it does not.

The kernel of the other machine acknowledges what arrives, also for a process that is frozen or does
not read. So silence is of the path: a router has forgotten the connection, a firewall drops it, the
link is cut, or large packets do not pass. `TCP_USER_TIMEOUT` is no remedy: with 1 s it ended, after
1.5 s, a connection to a live process that merely did not read. Nor are probes of TCP, which come
once a second at most: on a poor line one is soon lost. (tests/unit/aio/test_flows.py)
"""

import contextlib
import socket
import struct
import sys
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


# ── options of the system ───────────────────────────────────────────────────────────────────────

KEEPALIVE = 60  # seconds until TCP probes an idle connection
_TCP_RTO_MAX_MS = 44  # Linux 6.15; Python does not name it
_DEFAULT_RTO_MAX_MS = 120_000
_UNACKNOWLEDGED = struct.Struct("=24xI")  # packets, of Linux's `struct tcp_info`
LONGEST_SILENCE = 900.0  # seconds: about what TCP has by default


def retry_soon(connected: socket.socket) -> None:
    """Let TCP send again every second, for `LONGEST_SILENCE` seconds, where Linux can.

    By default the pauses double up to two minutes, so a connection works again long after the link.
    The limit is not that of bytes which this machine could not send: its interface is down, say.
    Linux gives up after `tcp_retries2` attempts then, which are 15 s with short pauses.
    """
    if sys.platform == "linux":
        # First the limit: with short pauses, the usual 15 attempts are over soon.
        with contextlib.suppress(OSError):
            timeout = int(LONGEST_SILENCE * 1000)
            connected.getsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS)
            if not connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
            connected.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)


def send_again(connected: socket.socket) -> bool:
    """Let TCP send again soon on a connection that nothing replaces: its path carries nothing.

    Return whether something is sent and not acknowledged. If so, call this again later: the short
    pauses must not stay.
    """
    is_missing = False
    with contextlib.suppress(OSError):
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKNOWLEDGED.size)
        if is_missing := _UNACKNOWLEDGED.unpack(info)[0] > 0:
            retry_soon(connected)
        elif sys.platform == "linux":
            connected.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _DEFAULT_RTO_MAX_MS)
    with contextlib.suppress(OSError):
        if connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY):
            # Linux sends at once what it could not send before.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return is_missing


def probe_when_idle(connected: socket.socket) -> None:
    """Let TCP notice a machine that is off, and routers remember an idle connection."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    set_options(connected, TCP_KEEPIDLE=KEEPALIVE, TCP_KEEPINTVL=15, TCP_KEEPCNT=4)


def end_when_silent(connected: socket.socket, seconds: float) -> None:
    """Let a TCP socket fail if the other end acknowledges nothing for `seconds`, idle or not.

    Without it, TCP tries again for 15 minutes, and an idle connection to a lost host stays. Routers
    forget connections that are idle for some minutes, so probes are not rarer than those of
    `probe_when_idle`. Call `retry_soon` too for a connection that is replaced when it has failed.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    set_options(
        connected,
        TCP_KEEPIDLE=max(1.0, min(KEEPALIVE, seconds / 2)),
        TCP_KEEPINTVL=max(1.0, min(KEEPALIVE / 4, seconds / 8)),
        TCP_USER_TIMEOUT=seconds * 1000,
    )


def set_options(connected: socket.socket, **options: float) -> None:
    """Set options of TCP by their names, where the system has them."""
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, int(value))
