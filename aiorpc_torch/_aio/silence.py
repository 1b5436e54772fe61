"""TCP connections whose other end acknowledges nothing: probes, and a time limit."""

import contextlib
import socket
import struct
import sys

KEEPALIVE = 60  # seconds until TCP probes an idle connection
_PROBES = {socket.TCP_KEEPIDLE: KEEPALIVE, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}
_TCP_RTO_MAX_MS = 44  # Linux 6.15; Python does not name it
_DEFAULT_RTO_MAX_MS = 120_000
_UNACKNOWLEDGED = struct.Struct("=24xI")  # of Linux's `struct tcp_info`
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
        if is_missing := _unacknowledged(connected) > 0:
            retry_soon(connected)
        elif sys.platform == "linux":
            connected.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _DEFAULT_RTO_MAX_MS)
    with contextlib.suppress(OSError):
        if connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY):
            # Linux sends at once what it could not send before.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return is_missing


def _unacknowledged(connected: socket.socket) -> int:
    """Return how many packets are sent and not acknowledged."""
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKNOWLEDGED.size)
    return int(_UNACKNOWLEDGED.unpack(info)[0])


def probe_when_idle(connected: socket.socket) -> None:
    """Let TCP notice a machine that is off, and routers remember an idle connection."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def end_when_silent(connected: socket.socket, seconds: float) -> None:
    """Let a TCP socket fail if the other end acknowledges nothing for `seconds`, idle or not.

    Without it, TCP tries again for 15 minutes, and an idle connection to a lost host stays. Routers
    forget connections that are idle for some minutes, so probes are not rarer than those of
    `probe_when_idle`. Call `retry_soon` too for a connection that is replaced when it has failed.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": max(1.0, min(KEEPALIVE, seconds / 2)),
        "TCP_KEEPINTVL": max(1.0, min(KEEPALIVE / 4, seconds / 8)),
        "TCP_USER_TIMEOUT": seconds * 1000,
    }
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # not all are everywhere
            connected.setsockopt(socket.IPPROTO_TCP, option, int(value))
