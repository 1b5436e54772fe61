"""Accepting connections at sockets that listen, on an event loop.

Not asyncio's server: when it is closed, connections that it accepted a moment before have no
transport yet; it never closes them, and their callers wait. (tests/unit/server/test_listener.py)
"""

import asyncio
import logging
import socket
from collections.abc import Callable

from .fork import close_on_fork

log = logging.getLogger("aiorpc_torch")

ACCEPT_RETRY = 1.0  # seconds, where a connection cannot be accepted for lack of descriptors


class Acceptor:
    """Accepts connections at the sockets that are added, until `close`. On the running loop.

    Args:
        owner: whose sockets they are, for the log.
        accepted: takes each connection.
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
