"""Sockets: abstract Unix ones, some taken from transports, and connections that are accepted.

Abstract Unix sockets connect the processes of one network namespace. They leave no file behind
after `kill -9`.
"""

import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator

from .fork import close_on_fork

log = logging.getLogger("aiorpc_torch")

BACKLOG = 128
_UCRED = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


@contextlib.contextmanager
def closed_on_error(sock: socket.socket) -> Iterator[socket.socket]:
    """Close a socket if the block raises."""
    try:
        yield sock
    except BaseException:
        sock.close()
        raise


def has_ended(*connected: socket.socket) -> bool:
    """Return whether the other end of a socket has closed it, even if there is more to read."""
    poller = select.poll()
    for each in connected:
        if (descriptor := each.fileno()) >= 0:
            poller.register(descriptor, select.POLLRDHUP)
    return bool(poller.poll(0))


def listen_unix(name: str) -> socket.socket:
    """Return a socket that listens. Raises OSError if the name is in use."""
    with closed_on_error(socket.socket(socket.AF_UNIX)) as found:
        found.setblocking(False)
        found.bind(f"\0{name}")
        found.listen(BACKLOG)
    return found


def connect_unix(name: str) -> socket.socket:
    """Return a socket that is connected.

    If the backlog is full, this `connect` fails. asyncio's seems to succeed, and the first write
    fails.
    """
    with closed_on_error(socket.socket(socket.AF_UNIX)) as found:
        found.setblocking(False)
        found.connect(f"\0{name}")
    return found


def peer_pid(peer: socket.socket) -> int:
    """Return the pid of the process at the other end, 0 if it is in another pid namespace.

    At the end that has connected it is known before the other process answers.
    """
    return _credentials(peer)[0]


def is_same_user(peer: socket.socket) -> bool:
    """Return whether the other end is a process of this process's user.

    A user that this user namespace does not map has the overflow id, 65534 mostly, which is also
    the id of a real user: it is another one, like all others.
    """
    return _credentials(peer)[1] == os.geteuid()


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    """Return pid, user and group of the process at the other end."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(data)
    return pid, uid, gid


def detach_socket(transport: asyncio.Transport) -> socket.socket:
    """Return the socket of a transport, which ends. What the transport has read is no part of it.

    A transport closes its descriptor and does not shut the socket down, so a copy stays connected.
    """
    descriptor = os.dup(transport.get_extra_info("socket").fileno())
    transport.abort()
    return socket.socket(fileno=descriptor)


ACCEPT_RETRY = 1.0  # seconds, where a connection cannot be accepted for lack of descriptors


class Acceptor:
    """Gives connections at the sockets that are added to `accepted`. On the running loop.

    The log names their `owner`.
    """

    def __init__(self, owner: str, accepted: Callable[[socket.socket], object]) -> None:
        self._owner = owner
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []

    def add(self, listening: socket.socket) -> None:
        """Accept connections at a socket from now on."""
        self._listening.append(listening)
        close_on_fork(listening)
        listening.setblocking(False)
        self._watch(listening)

    def close(self) -> None:
        """Close the sockets."""
        while self._listening:
            listening = self._listening.pop()
            self._loop.remove_reader(listening)
            listening.close()

    def _watch(self, listening: socket.socket) -> None:
        if listening in self._listening:  # else it was closed before the next attempt
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        try:
            found, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as exc:  # no descriptors or memory: the connection waits in the backlog
            log.warning("%s cannot accept a connection: %s", self._owner, exc)
            self._loop.remove_reader(listening)
            self._loop.call_later(ACCEPT_RETRY, self._watch, listening)
        else:
            self._accepted(found)
