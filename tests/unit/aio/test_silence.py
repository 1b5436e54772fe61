"""The options of a socket whose other end may be silent for a limited time."""

import socket

from aiorpc_torch._aio.silence import end_when_silent, probe_when_idle


def test_probes_of_an_idle_connection() -> None:
    """A machine that is off is noticed after two minutes."""
    with socket.socket() as sock:
        probe_when_idle(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        assert [sock.getsockopt(socket.IPPROTO_TCP, each) for each in options] == [60, 15, 4]


def test_the_limit_holds_for_idle_connections_too() -> None:
    """Probes begin in time to notice it."""
    with socket.socket() as sock:
        end_when_silent(sock, 120.0)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL
        found = [sock.getsockopt(socket.IPPROTO_TCP, each) for each in options]
        assert found == [120_000, 60, 15]


def test_a_long_limit_has_no_rarer_probes() -> None:
    """Routers forget connections that are idle for some minutes."""
    with socket.socket() as sock:
        end_when_silent(sock, 900.0)
        options = socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL
        found = [sock.getsockopt(socket.IPPROTO_TCP, each) for each in options]
        assert found == [900_000, 60, 15]


def test_a_short_limit_has_whole_seconds() -> None:
    with socket.socket() as sock:
        end_when_silent(sock, 2.0)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 1
