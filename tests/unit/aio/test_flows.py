"""The path of a TCP connection, as the kernel knows it."""

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._aio.flows import Flow, FlowInfo, read_flow
from tests.support.dropped_packets import drop_incoming

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells of paths")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    with ours, theirs:
        yield ours, theirs


def silence_of(flow: Flow, sock: socket.socket) -> float:
    info = read_flow(sock)
    assert info is not None
    return flow.silence(info, time.monotonic())


def test_a_path_that_carries_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    """Its silence grows from the first look on."""
    ours, theirs = ends
    flow = Flow()
    ours.send(b"1")
    assert theirs.recv(1) == b"1"
    assert silence_of(flow, ours) == 0.0
    drop_incoming(theirs)
    ours.send(b"2")
    assert silence_of(flow, ours) == 0.0
    time.sleep(0.3)  # what is measured
    assert silence_of(flow, ours) >= 0.3


def test_a_process_that_does_not_read(ends: tuple[socket.socket, socket.socket]) -> None:
    """Its kernel answers all probes, so the path is not silent."""
    ours, _ = ends
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))
    flow, end, longest = Flow(), time.monotonic() + 1.5, 0.0
    while time.monotonic() < end:
        longest = max(longest, silence_of(flow, ours))
        time.sleep(0.05)  # what is measured
    assert longest < 1.0


class Told:
    """A socket of which the kernel tells these fields, by their place in `struct tcp_info`."""

    def __init__(self, size: int, **fields: int) -> None:
        self._data = bytearray(size)
        for name, value in fields.items():
            if PLACES[name] < size:
                struct.pack_into("=I", self._data, PLACES[name], value)

    def getsockopt(self, _: int, __: int, size: int) -> bytes:
        return bytes(self._data[:size])


PLACES = {"packet": 16, "unacknowledged": 24, "unsent": 144, "room": 228}


@pytest.mark.parametrize(
    ("told", "is_missing"),
    [
        (Told(248, packet=1448), False),
        (Told(248, packet=1448, unacknowledged=1), True),
        (Told(248, packet=1448, unsent=5000, room=65536), True),  # dropped on this machine
        (Told(248, packet=1448, unsent=7, room=7), True),
        (Told(248, packet=1448, unsent=5000, room=0), False),  # the other process does not read
        (Told(248, packet=1448, unsent=5000, room=1000), False),
        (Told(128, packet=1448, unacknowledged=1), True),  # older systems
        (Told(128, packet=1448), False),
    ],
)
def test_what_is_missing(told: Any, is_missing: bool) -> None:
    info = read_flow(told)
    assert info is not None
    assert info.is_missing is is_missing


def test_a_closed_socket() -> None:
    with socket.socket() as sock:
        pass
    assert read_flow(sock) is None


looks = st.lists(st.tuples(st.floats(0.01, 10.0), st.integers(0, 3), st.integers(0, 2)), min_size=1)


@given(looks)
def test_silence_is_the_time_without_progress(each: list[tuple[float, int, int]]) -> None:
    """It starts with the first look at missing bytes, and ends with any progress."""
    flow, now, arrived, since = Flow(), 0.0, 0, 0.0
    was_missing = False
    for pause, missing, progress in each:
        now, arrived = now + pause, arrived + progress
        found = flow.silence(FlowInfo(missing > 0, 0.0, arrived), now)
        if not (missing and was_missing) or progress:
            since = now
        was_missing = missing > 0
        assert found == pytest.approx(now - since)


@given(st.lists(st.floats(0.01, 5.0), min_size=2))
def test_silence_grows(pauses: list[float]) -> None:
    flow, now, found = Flow(), 0.0, []
    for pause in pauses:
        now += pause
        found.append(flow.silence(FlowInfo(True, 0.0, 7), now))
    assert found[0] == 0.0
    assert all(before < after for before, after in pairwise(found))
