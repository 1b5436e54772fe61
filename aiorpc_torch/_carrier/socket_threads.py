"""Threads that send and receive transfers, one for each socket.

Blocking calls leave the GIL, so the event loops stay responsive: if they carried the bytes, small
calls would wait for large tensors. Each socket is used in one direction, with or without TLS.
The threads end when their socket is shut down. (tests/unit/carrier/test_socket_threads.py)
"""

import contextlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from .._aio.flows import Flow, end_when_silent, read_flow, retry_soon, set_options
from .._aio.fork import close_on_fork
from .._aio.sockets import has_ended
from .transfers import HEADER, IncomingTransfers, OutgoingTransfer

SOCKETS = 2
"""Sockets for one direction of a connection. Four carry little more, and delay the event loop."""

SILENCE = 120.0
"""Seconds after which a socket fails whose peer acknowledges nothing: the link is cut, or the peer
is frozen. The membership has told the callers long before; this ends threads, and frees
tensors. Without it, TCP tries again for 15 minutes."""

UNSENT = 128 * 1024
"""Bytes beyond those on their way that the system takes from a thread. With its usual megabytes, a
small call beside 128 MB took twice the time, and transfers took longer. Other bounds of its buffers
would bound what is on its way on a long line. (benchmarks.between_hosts)"""

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
        self._most = SOCKETS
        self._sockets: list[socket.socket] = []
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of sockets."""
        return len(self._sockets)

    def add(self, sock: socket.socket, *, is_own: bool) -> None:
        """Use a connected socket; close it if there are enough, or no thread can be started.

        It `is_own` if this process has opened it.
        """
        if self._is_closed or len(self._sockets) >= self._most:
            sock.close()
            return
        close_on_fork(sock)
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            end_when_silent(sock, SILENCE)
            retry_soon(sock)
            set_options(sock, TCP_NODELAY=1, TCP_NOTSENT_LOWAT=UNSENT)
        self._sockets.append(sock)
        try:
            threading.Thread(
                target=self._run, args=(sock, is_own), name=self._name, daemon=True
            ).start()
        except RuntimeError as exc:
            sock.close()
            self._failed(exc)

    def close(self) -> None:
        """End the threads, also those that send or receive."""
        self._is_closed = True
        for sock in [*self._sockets]:
            with contextlib.suppress(OSError):  # it is closed
                # Not the method of `SSLSocket`: a thread may send in clear text before it is over.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        self._sockets.clear()

    def _run(self, sock: socket.socket, is_own: bool) -> None:
        try:
            with sock:
                if self._is_ready(sock, is_own):
                    self._work(sock)
        except Exception as exc:
            if not self._is_closed:
                # Its frames refer to the memory of a chunk, and it may be kept: by a log, say.
                self._failed(exc.with_traceback(None))
        finally:
            with contextlib.suppress(ValueError):  # all were closed
                self._sockets.remove(sock)

    def _is_ready(self, sock: socket.socket, is_own: bool) -> bool:
        """Begin to use a socket; return False if the peer has closed it."""
        if is_own:
            sock.sendall(_READY)
            return True
        return bool(sock.recv(len(_READY)))

    def _work(self, sock: socket.socket) -> None:
        raise NotImplementedError


class SocketSender(_SocketThreads):
    """Sends transfers on the sockets of one direction.

    `ended` is told in a thread that no thread needs the tensors of a transfer any more.
    """

    def __init__(self, ended: Callable[[OutgoingTransfer], object], failed: Failed) -> None:
        super().__init__("aiorpc-send", failed)
        self._ended = ended
        self._flows: dict[socket.socket, Flow] = {}
        self._transfers: queue.SimpleQueue[OutgoingTransfer | None] = queue.SimpleQueue()

    def send(self, transfer: OutgoingTransfer) -> None:
        """Send a transfer, in turn with the others."""
        self._transfers.put(transfer)

    def has_failed(self) -> bool:
        """Return whether the peer has closed a socket, or one has failed."""
        return has_ended(*self._sockets)

    def silence(self) -> float:
        """Return the longest time for which bytes that were sent are missing, in seconds."""
        known, self._flows, now = self._flows, {}, time.monotonic()
        longest = 0.0
        for sock in [*self._sockets]:
            flow = self._flows[sock] = known.get(sock) or Flow()
            info = None if sock.family == socket.AF_UNIX else read_flow(sock)
            if info is not None:
                longest = max(longest, flow.silence(info, now))
        return longest

    def close(self) -> None:
        super().close()
        self._transfers.put(None)

    def _work(self, sock: socket.socket) -> None:
        while not self._is_closed and (transfer := self._transfers.get()) is not None:
            self._send_chunk(sock, transfer)
            del transfer  # an idle thread must not keep tensors
        self._transfers.put(None)  # for the next thread

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

    `arrived` is told in a thread the number of a transfer that has come whole, and whether there
    was memory for it.
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

        # The peer closes idle sockets, and may open others before threads here have noticed it.
        self._most = 2 * SOCKETS

    def _is_ready(self, sock: socket.socket, is_own: bool) -> bool:
        try:
            return super()._is_ready(sock, is_own)
        except OSError:  # the peer closes idle sockets, this one as soon as it was open
            return False

    def _work(self, sock: socket.socket) -> None:
        header = memoryview(bytearray(HEADER.size))
        while _fill(sock, header, may_end=True):
            self._receive_chunk(sock, *HEADER.unpack(header))

    def _receive_chunk(
        self, sock: socket.socket, number: int, size: int, offset: int, length: int, shared: bool
    ) -> None:
        memory = self._transfers.begin(number, size, offset, length, shared)
        if memory is None:  # the transfer was cancelled
            scratch = memoryview(bytearray(min(length, _SCRATCH)))
            for left in range(length, 0, -_SCRATCH):
                _fill(sock, scratch[:left])
        else:
            _fill(sock, memory)
            del memory  # before it may be read, and freed
        outcome = self._transfers.end(number, length)
        if outcome is not None:
            self._arrived((number, outcome))


def _send_all(sock: socket.socket, buffers: list[Any]) -> None:
    """Send buffers one after another, in one system call if possible."""
    if isinstance(sock, ssl.SSLSocket):
        for each in buffers:
            sock.sendall(each)
        return
    sent = sock.sendmsg(buffers)
    for each in buffers:
        if sent < len(each):
            sock.sendall(memoryview(each)[sent:])
        sent = max(0, sent - len(each))


def _fill(sock: socket.socket, memory: memoryview, *, may_end: bool = False) -> bool:
    """Fill memory from a socket; return False if the socket ends or fails before, and may.

    Raises:
        OSError: if the socket ends or fails and may not.
    """
    received, flags = 0, 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    while received < len(memory):
        rest = memory[received:]
        try:
            count = sock.recv_into(rest, len(rest), flags)
        except OSError:  # for one, the link is cut for long
            if may_end and not received:
                return False
            raise
        if not count:
            if may_end and not received:
                return False
            raise ConnectionResetError("a tensor socket has ended within a chunk")
        received += count
    return True
