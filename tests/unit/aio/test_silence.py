"""The options of a socket whose other end may be silent for a limited time."""

import socket
import time

import pytest

from aiorpc_torch._aio.flows import (
    LONGEST_SILENCE,
    end_when_silent,
    probe_when_idle,
    retry_soon,
    send_again,
)
from tests.unit.aio.test_flows import drop_incoming, ends as ends


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


def test_short_pauses_keep_a_limit_that_was_set() -> None:
    """Otherwise TCP would give up after its usual number of attempts, within seconds."""
    with socket.socket() as limited, socket.socket() as free:
        end_when_silent(limited, 120.0)
        retry_soon(limited)
        assert limited.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        retry_soon(free)
        found = free.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert found in (0, LONGEST_SILENCE * 1000)  # 0 where Linux cannot shorten the pauses


RTO_MAX_MS, _SO_DETACH_FILTER = 44, 27


def longest_pause(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, RTO_MAX_MS)


def test_pauses_while_a_link_is_cut(ends: tuple[socket.socket, socket.socket]) -> None:
    """Short for what is under way; for the rest Linux would give up after 15 short ones."""
    sent, idle = ends
    try:
        before = longest_pause(sent)
    except OSError:
        pytest.skip("this Linux cannot shorten the pauses")
    drop_incoming(idle)
    sent.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent.send(b"1")
    assert [send_again(sock) for sock in ends] == [True, False]
    assert (longest_pause(sent), longest_pause(idle)) == (1000, before)
    idle.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
    end = time.monotonic() + 30
    while send_again(sent):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert longest_pause(sent) == before
