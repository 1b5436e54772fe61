"""The proof of callers that connect sockets for tensors by TLS, each in a thread.

Such a socket is one of blocking calls from the start: asyncio cannot give away what has begun TLS.
(tests/unit/server/test_socket_proofs.py)
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from .._aio.fork import close_on_fork
from .._aio.loops import call_soon
from .._port.dialer import receive_exactly
from .._port.strangers import Strangers, host_of
from .._port.tls import Tls
from .._wire.handshake import HELLO, Hello, new_nonce

log = logging.getLogger("aiorpc_torch")

MAX_UNPROVEN = 64  # sockets without proof at once; beyond it one is closed
PROOF_TIMEOUT = 5.0  # seconds

Received = Callable[[socket.socket, Hello, bytes], None]
"""Takes a socket, what its caller has sent as proof, and the nonce that it had to answer."""


class SocketProofs:
    """The sockets that have not proven themselves yet. `received` is called on the event loop."""

    def __init__(self, tls: Tls, loop: asyncio.AbstractEventLoop, received: Received) -> None:
        self._tls = tls
        self._loop = loop
        self._received = received
        self._strangers = Strangers(MAX_UNPROVEN)

    def begin(self, accepted: socket.socket) -> None:
        """Wait for the proof at an accepted socket. On the event loop."""
        closer = accepted.dup()  # whoever wraps a socket closes the object
        close_on_fork(closer)
        timer = self._loop.call_later(PROOF_TIMEOUT, _shut_down, closer)
        self._strangers.add(closer, host_of(accepted), lambda _: _shut_down(closer))

        def done(outcome: tuple[socket.socket, Hello, bytes] | None) -> None:
            timer.cancel()
            self._strangers.remove(closer)
            closer.close()
            if outcome is not None:
                self._received(*outcome)

        def work() -> None:
            accepted.settimeout(PROOF_TIMEOUT)
            sock, nonce, outcome = accepted, new_nonce(), None
            try:
                sock = self._tls.server.wrap_socket(accepted, server_side=True)
                sock.sendall(nonce)
                outcome = sock, Hello.load(receive_exactly(sock, HELLO)), nonce
            except (OSError, ValueError) as exc:
                log.debug("refused a socket for tensors: %r", exc)
                sock.close()
                accepted.close()
            call_soon(self._loop, done, outcome)

        try:
            threading.Thread(target=work, name="aiorpc-proof", daemon=True).start()
        except RuntimeError as exc:  # the caller's tensors travel by torch RPC
            log.warning("refused a socket for tensors: %r", exc)
            accepted.close()
            done(None)

    def close(self) -> None:
        """End all that wait."""
        self._strangers.close()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
