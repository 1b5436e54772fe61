"""Threads that send and receive transfers, one for each socket.

Blocking calls leave the GIL, so the event loops stay responsive: if they carried the bytes, small
calls would wait for large tensors. Each socket is used in one direction.
The threads end when their socket is shut down. (tests/unit/sockets/test_socket_threads.py)
"""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from .._aio.fork import close_on_fork
from .transfers import HEADER, IncomingTransfers, OutgoingTransfer

SOCKETS = 2
"""Sockets for one direction of a connection. Four carry little more, and delay the event loop."""

_READY = b"!"
"""Sent by the end that has opened a socket: until then its transport may read what is sent."""

_SCRATCH = 256 * 1024  # bytes that are discarded at once

Failed = Callable[[Exception], object]
"""Is told in a thread that a socket has failed."""


class _SocketThreads:
    """Sockets with a thread each. All methods but `_run` are for the thread of the event loop."""

    def __init__(self, name: str, failed: Failed) -> None:
        self._name = name
        self._failed = failed
        self._sockets: list[socket.socket] = []
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of sockets."""
        return len(self._sockets)

    def add(self, sock: socket.socket, *, is_own: bool) -> None:
        """Use a connected socket; close it if there are enough, or no thread can be started.

        Args:
            sock: The socket.
            is_own: True if this process has opened it.
        """
        if self._is_closed or len(self._sockets) >= SOCKETS:
            sock.close()
            return
        close_on_fork(sock)
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # they are idle for long
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        self._sockets.append(sock)
        try:
            work = threading.Thread(target=self._run, args=(sock, is_own), name=self._name)
            work.daemon = True
            work.start()
        except RuntimeError as exc:
            sock.close()
            self._failed(exc)

    def close(self) -> None:
        """End the threads, also those that send or receive."""
        self._is_closed = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):  # it is closed
                sock.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def _run(self, sock: socket.socket, is_own: bool) -> None:
        try:
            with sock:
                if is_own:
                    sock.sendall(_READY)
                elif not sock.recv(len(_READY)):
                    return
                self._work(sock)
        except Exception as exc:
            if not self._is_closed:
                self._failed(exc)

    def _work(self, sock: socket.socket) -> None:
        raise NotImplementedError


class SocketSender(_SocketThreads):
    """Sends transfers on the sockets of one direction.

    Args:
        ended: Is told in a thread that no thread needs the tensors of a transfer any more.
        failed: Is told in a thread that a socket has failed.
    """

    def __init__(self, ended: Callable[[OutgoingTransfer], object], failed: Failed) -> None:
        super().__init__("aiorpc-send", failed)
        self._ended = ended
        self._transfers: queue.SimpleQueue[OutgoingTransfer | None] = queue.SimpleQueue()

    def send(self, transfer: OutgoingTransfer) -> None:
        """Send a transfer, in turn with the others."""
        self._transfers.put(transfer)

    def close(self) -> None:
        for _ in self._sockets:
            self._transfers.put(None)
        super().close()

    def _work(self, sock: socket.socket) -> None:
        while not self._is_closed and (transfer := self._transfers.get()) is not None:
            self._send_chunk(sock, transfer)
            del transfer  # an idle thread must not keep tensors

    def _send_chunk(self, sock: socket.socket, transfer: OutgoingTransfer) -> None:
        try:
            chunk = transfer.take()
        except ValueError:  # its storage was freed: the message fails when it is sent otherwise
            if transfer.cancel():
                self._ended(transfer)
            return
        if chunk is None:
            return
        self._transfers.put(transfer)  # behind the others
        try:
            _send_all(sock, chunk)
        finally:
            if transfer.sent():
                self._ended(transfer)


class SocketReceiver(_SocketThreads):
    """Receives transfers on the sockets of one direction.

    Args:
        transfers: The transfers that come.
        arrived: Is told in a thread the number of a transfer that has come whole, and whether
            there was memory for it.
        failed: Is told in a thread that a socket has failed.
    """

    def __init__(
        self,
        transfers: IncomingTransfers,
        arrived: Callable[[tuple[int, bool]], object],
        failed: Failed,
    ) -> None:
        super().__init__("aiorpc-receive", failed)
        self._transfers = transfers
        self._arrived = arrived

    def _work(self, sock: socket.socket) -> None:
        header = memoryview(bytearray(HEADER.size))
        while _fill(sock, header, may_end=True):
            self._receive_chunk(sock, *HEADER.unpack(header))

    def _receive_chunk(
        self, sock: socket.socket, number: int, size: int, offset: int, length: int, shared: bool
    ) -> None:
        memory = self._transfers.begin(number, size, offset, length, shared)
        if memory is None:
            _discard(sock, length)
        else:
            _fill(sock, memory)
            del memory  # before it may be read, and freed
        outcome = self._transfers.end(number, length)
        if outcome is not None:
            self._arrived((number, outcome))


def _send_all(sock: socket.socket, buffers: list[Any]) -> None:
    """Send buffers one after another, in one system call if possible."""
    sent = sock.sendmsg(buffers)
    for each in buffers:
        if sent < len(each):
            sock.sendall(memoryview(each)[sent:])
        sent = max(0, sent - len(each))


def _fill(sock: socket.socket, memory: memoryview, *, may_end: bool = False) -> bool:
    """Fill memory from a socket; return False if the socket ends before, and may.

    Raises:
        ConnectionResetError: if the socket ends and may not.
    """
    received = 0
    while received < len(memory):
        count = sock.recv_into(memory[received:], 0, socket.MSG_WAITALL)
        if not count:
            if may_end and not received:
                return False
            raise ConnectionResetError("a tensor socket has ended within a chunk")
        received += count
    return True


def _discard(sock: socket.socket, length: int) -> None:
    """Receive bytes of a cancelled transfer."""
    scratch = memoryview(bytearray(min(length, _SCRATCH)))
    while length:
        part = scratch[:length]
        _fill(sock, part)
        length -= len(part)
