"""Threads for the sockets of transfers: they begin, send, fail and end."""

import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from aiorpc_torch._carrier.socket_threads import (
    _READY,
    SILENCE,
    SOCKETS,
    SocketReceiver,
    SocketSender,
    _send_all,
)
from aiorpc_torch._carrier.transfers import HEADER, IncomingTransfers, OutgoingTransfer
from aiorpc_torch._wire.blocks import place, tensors_at
from aiorpc_torch._wire.frames import ProtocolError

SOON = 30.0


def allocate(size: int, _: bool) -> tuple[Any, None]:
    return bytearray(size), None


class Ends:
    """A sender and a receiver, and what they tell."""

    def __init__(self, pairs: Sequence[tuple[socket.socket, socket.socket]] = ()) -> None:
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.incoming = IncomingTransfers(1 << 26, allocate)
        self.sender = SocketSender(self.told.put, self.told.put)
        self.receiver = SocketReceiver(self.incoming, self.told.put, self.told.put)
        self.pairs = pairs or [socket.socketpair() for _ in range(SOCKETS)]
        for near, far in self.pairs:
            self.sender.add(near, is_own=True)
            self.receiver.add(far, is_own=False)

    def write(self, data: bytes) -> None:
        """Send these bytes to the receiver, on a socket of their own, and no more."""
        near, far = socket.socketpair()
        with near:
            self.receiver.add(far, is_own=False)
            near.sendall(_READY + data)

    def next(self) -> Any:
        return self.told.get(timeout=SOON)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        wait_for_threads()


def wait_for_threads() -> None:
    """Until all have ended."""
    deadline = time.monotonic() + SOON
    names = {"aiorpc-send", "aiorpc-receive"}
    while names & {each.name for each in threading.enumerate()}:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.close()


def transfer(number: int, x: torch.Tensor) -> OutgoingTransfer:
    found = place([x], in_one_block=True)
    assert found is not None
    return OutgoingTransfer(number, found[0][0])


def test_transfers_arrive_whole(ends: Ends) -> None:
    """Both ends tell, in whatever order."""
    tensors = {number: torch.rand(1 << 20) for number in (1, 2, 3)}
    for number, x in tensors.items():
        ends.sender.send(transfer(number, x))
    told = [ends.next() for _ in range(6)]
    arrived = [each for each in told if isinstance(each, tuple)]
    assert sorted(arrived) == [(1, True), (2, True), (3, True)]
    for number, x in tensors.items():
        memory, _ = ends.incoming.take(number)
        assert torch.equal(torch.frombuffer(memory, dtype=torch.float32), x)


def tls_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TLS connection, without certificates."""
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        contexts.append(context := ssl.SSLContext(protocol))
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # the last one that needs none
        context.set_ciphers("aNULL:@SECLEVEL=0")
    near, far = socket.socketpair()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(contexts[1].wrap_socket, far, server_side=True)
        return contexts[0].wrap_socket(near), other.result(SOON)


def test_transfers_arrive_whole_by_tls() -> None:
    """And the threads end with it."""
    ends = Ends([tls_pair() for _ in range(SOCKETS)])
    tensors = [torch.rand(1 << 19), torch.rand(3)]  # with padding behind the last
    found = place(tensors, in_one_block=True)
    assert found is not None
    ends.sender.send(OutgoingTransfer(1, found[0][0]))
    while ends.next() != (1, True):
        pass
    memory, _ = ends.incoming.take(1)
    for x, y in zip(tensors, tensors_at(found[1], [(memory, len(memory))]), strict=True):
        assert torch.equal(x, y)
    ends.close()
    assert ends.told.empty() or isinstance(ends.next(), OutgoingTransfer)


def test_bytes_of_a_cancelled_transfer_by_tls() -> None:
    """They are discarded."""
    ends = Ends([tls_pair()])
    x = torch.ones(1 << 20)
    ends.incoming.drop(1, 4 << 20)
    ends.sender.send(transfer(1, x))
    assert isinstance(ends.next(), OutgoingTransfer)
    deadline = time.monotonic() + SOON
    while len(ends.incoming):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    ends.close()


def test_a_silent_peer_is_given_up() -> None:
    """By the system, in time that is far beyond the heartbeat."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    ends = Ends([(near, far)])
    for sock in (near, far):
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENCE
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < SILENCE
    ends.close()


def test_a_failure_of_an_idle_socket_is_none(ends: Ends) -> None:
    """Nothing is lost by it: the sender opens another one, or fails itself."""
    near, _ = ends.pairs[0]
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    near.close()
    deadline = time.monotonic() + SOON
    while len(ends.receiver) == SOCKETS:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert ends.told.empty()


def test_a_receiver_takes_sockets_before_it_has_noticed_the_end_of_others() -> None:
    """A sender that was idle has closed them."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    receiver = SocketReceiver(IncomingTransfers(1 << 20, allocate), told.put, told.put)
    pairs = [socket.socketpair() for _ in range(2 * SOCKETS + 1)]
    for near, far in pairs:
        receiver.add(far, is_own=False)
        near.close()
    assert len(receiver) <= 2 * SOCKETS
    assert pairs[-1][1].fileno() == -1 or len(receiver) < 2 * SOCKETS
    receiver.close()


@pytest.mark.parametrize("is_own", [False, True])
def test_a_socket_that_ends_before_it_is_used(is_own: bool) -> None:
    """It leaves its place to others, and is no failure: the peer closes what it does not need."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    receiver = SocketReceiver(IncomingTransfers(1 << 20, allocate), told.put, told.put)
    near, far = socket.socketpair()
    near.close()
    receiver.add(far, is_own=is_own)
    deadline = time.monotonic() + SOON
    while len(receiver):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert told.empty()


def test_surplus_sockets_are_closed(ends: Ends) -> None:
    """And so are those that come after the end."""
    for _ in range(2):
        near, far = socket.socketpair()
        ends.sender.add(near, is_own=True)
        with far:
            assert far.recv(1) == b""
        ends.sender.close()
    assert len(ends.sender) == 0


def test_all_threads_end_though_one_ends_while_the_others_are_told() -> None:
    """It removes its socket meanwhile."""

    class Transfers(queue.SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(item, block, timeout)
            while threading.current_thread() is threading.main_thread() and len(sender) > 1:
                time.sleep(0.001)

    sender = SocketSender(print, print)
    sender._transfers = Transfers()
    pairs = [socket.socketpair() for _ in range(SOCKETS)]
    for near, _ in pairs:
        sender.add(near, is_own=True)
    sender.close()
    wait_for_threads()
    for _, far in pairs:
        far.close()


def test_an_end_between_chunks_is_no_failure(ends: Ends) -> None:
    """The connection tells why."""
    ends.sender.close()
    ends.close()
    assert ends.told.empty()


def test_an_end_within_a_chunk_is_a_failure(ends: Ends) -> None:
    """Whoever keeps the error does not keep the memory."""
    ends.write(HEADER.pack(1, 100, 0, 100, False) + b"half")
    assert isinstance(error := ends.next(), ConnectionResetError)
    assert error.__traceback__ is None


def test_a_malformed_chunk_is_a_failure(ends: Ends) -> None:
    ends.write(HEADER.pack(1, 100, 50, 100, False))
    assert isinstance(ends.next(), ProtocolError)


def test_a_dead_peer_is_a_failure(ends: Ends) -> None:
    """The transfer that is sent is given up by its thread."""
    for _, far in ends.pairs:
        far.shutdown(socket.SHUT_RDWR)
    ends.sender.send(sent := transfer(1, torch.ones(1 << 20)))
    assert isinstance(ends.next(), OSError)
    assert sent._in_progress <= 1


def test_a_blocked_thread_is_ended() -> None:
    """Its socket is shut down: nothing was read, or written, at the other end."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    near, far = socket.socketpair()
    with far:
        sender = SocketSender(told.put, told.put)
        sender.add(near, is_own=True)
        sender.send(sent := transfer(1, torch.ones(1 << 22)))
        assert far.recv(1)
        assert far.recv(1)  # of the chunk: the rest does not fit
        sender.close()
        # No failure is told: it was told to end, before or after this.
        assert sent.cancel() or told.get(timeout=SOON) is sent


def test_a_system_call_that_sends_a_part() -> None:
    """The rest follows, whatever buffer it is in."""

    class Short:
        """A socket that takes a few bytes at first."""

        def __init__(self, first: int) -> None:
            self.first, self.sent = first, b""

        def sendmsg(self, buffers: list[bytes]) -> int:
            self.sent = b"".join(buffers)[: self.first]
            return self.first

        def sendall(self, data: memoryview) -> None:
            self.sent += bytes(data)

    for first in range(1, 11):
        short = Short(first)
        _send_all(short, [b"abc", b"defg", b"hij"])  # type: ignore[arg-type]
        assert short.sent == b"abcdefghij"
