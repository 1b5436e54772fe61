"""The listening sockets of a worker: an abstract Unix socket and, for remote peers, a TCP port.

A connection becomes a session once its caller has proven that torch RPC gave it the credentials.
Until then the connection has a fixed buffer and a time limit, and the number of such connections is
limited. (tests/loopback/test_connections_internals.py)
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from .._aio.fork import close_on_fork
from .._aio.host import network_namespace
from .._aio.loops import call_soon
from .._aio.sockets import BACKLOG, Acceptor, detach_socket, is_same_user, listen_unix
from .._channel import Channel
from .._peers.peers import Peer
from .._port.dialer import receive_exactly
from .._port.port import Port
from .._port.purposes import CALLS as CALLS_AT_PORT, TENSORS as TENSORS_AT_PORT
from .._port.strangers import LEFT, Strangers, host_of
from .._port.tls import Tls
from .._wire.handshake import (
    CALLS,
    HELLO,
    Addresses,
    Credentials,
    Hello,
    Introduction,
    Party,
    new_nonce,
    read_number,
)

log = logging.getLogger("aiorpc_torch")

MAX_UNPROVEN = 64
"""Unauthenticated connections; beyond it one is closed. Those of members have no bound: a member
may run code here, and a share of RLIMIT_NOFILE for each would refuse calls in large worlds. At 1024
descriptors, 500 members have two each."""

PROOF_TIMEOUT = 5.0  # seconds


class Listener:
    """The listening sockets of one worker, and the credentials that it gave to callers."""

    def __init__(
        self,
        me: Party,
        host: str | None,
        accept: Callable[[Party, int], Channel],
        accept_socket: Callable[[Party, int, int, socket.socket], None],
        port: Port | None = None,
    ) -> None:
        """Listen on a new abstract Unix socket, and on a TCP port of `host` if it is given.

        Args:
            accept: makes the session of a caller's connection with that number.
            accept_socket: takes a socket for tensors of that connection, and its purpose.
            port: the worker's one port for all purposes, in place of a port of `host`.
        """
        self._me = me
        # What takes the connections that the port has accepted, and their sockets.
        self._handed: deque[tuple[Callable[[], object], socket.socket]] = deque()
        self._accept = accept
        self._accept_socket = accept_socket
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(f"worker {me.name!r}", self._open)
        self._opening: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._credentials: dict[bytes, Credentials] = {}
        self._unproven, self._proving = Strangers(MAX_UNPROVEN), Strangers(MAX_UNPROVEN)
        try:
            name = f"aiorpc-{secrets.token_hex(16)}"
            self._acceptor.add(listen_unix(name))
            tcp = None
            if port is not None:
                port.serve(CALLS_AT_PORT, partial(self._hand_over, self._open))
                if port.tls is not None:
                    prove = partial(self._prove_in_thread, port.tls)
                    port.serve(TENSORS_AT_PORT, partial(self._hand_over, prove))
                tcp = port.host, port.number
            elif host is not None:
                tcp = self._listen_tcp(host)
            self.addresses = Addresses(network_namespace(), name, tcp)
        except BaseException:
            self.close()
            raise

    def _listen_tcp(self, host: str) -> tuple[str, int]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        inet = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._acceptor.add(inet)
        return host, int(inet.getsockname()[1])

    def listen_at(self, host: str) -> None:
        """Listen on a TCP port of `host` from now on, unless this worker listens on one."""
        if self.addresses.tcp is None and not self._is_closed:
            self.addresses = replace(self.addresses, tcp=self._listen_tcp(host))

    def _hand_over(
        self, take: Callable[..., object], accepted: socket.socket, *settings: ssl.SSLContext
    ) -> None:
        """Take a connection on the loop. Called in the port's thread.

        While the loop is blocked only so many wait, as in the backlog of a socket that listens.
        """
        if self._is_closed:  # the loop may run no more
            accepted.close()
            return
        self._handed.append((partial(take, accepted, *settings), accepted))
        if len(self._handed) > MAX_UNPROVEN:
            with contextlib.suppress(IndexError):  # the loop has taken the last one
                self._handed.popleft()[1].close()
        call_soon(self._loop, self._take_handed)

    def _take_handed(self) -> None:
        while self._handed:
            try:
                take, accepted = self._handed.popleft()
            except IndexError:  # the port's thread has closed the last one
                return
            if self._is_closed:
                accepted.close()
            else:
                take()

    def _open(self, accepted: socket.socket, settings: ssl.SSLContext | None = None) -> None:
        accepted.setblocking(False)
        make = partial(_Unproven, self)
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(make, accepted, ssl=settings)
        )
        self._opening.add(opening)

        def on_opened(opening: asyncio.Task[Any]) -> None:
            self._opening.discard(opening)
            if opening.cancelled() or opening.exception() is not None:
                accepted.close()

        opening.add_done_callback(on_opened)

    def _prove_in_thread(self, tls: Tls, accepted: socket.socket) -> None:
        """Wait for the proof at a socket for tensors by TLS, which has a thread meanwhile.

        Such a socket is one of blocking calls from the start: asyncio cannot give away what has
        begun TLS. (tests/unit/server/test_socket_proofs.py)
        """
        closer = accepted.dup()  # whoever wraps a socket closes the object
        close_on_fork(closer)
        timer = self._loop.call_later(PROOF_TIMEOUT, _shut_down, closer)
        self._proving.add(closer, host_of(accepted), lambda _: _shut_down(closer))

        def done(outcome: tuple[socket.socket, Hello, bytes] | None) -> None:
            timer.cancel()
            self._proving.remove(closer)
            closer.close()
            if outcome is not None:
                self._on_tensor_socket(*outcome)

        def work() -> None:
            accepted.settimeout(PROOF_TIMEOUT)
            sock, nonce, outcome = accepted, new_nonce(), None
            try:
                sock = tls.server.wrap_socket(accepted, server_side=True)
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

    def introduce(self, caller: Peer) -> Introduction:
        """Return the credentials and addresses for a caller; the same at each request."""
        if (known := caller.credentials) is None:
            party = Party(caller.name, caller.worker_id)
            known = caller.credentials = Credentials(party, self._me)
            self._credentials[known.key] = known
        return known, self.addresses

    def revoke(self, caller: Peer) -> None:
        """Revoke the credentials of a process."""
        if (known := caller.credentials) is not None:
            caller.credentials = None
            del self._credentials[known.key]

    def proven(self, hello: Hello, nonce: bytes) -> Credentials | None:
        """Return the credentials of a caller, None if it has not proven that it has them."""
        found = self._credentials.get(hello.key)
        return found if found is not None and hello.is_proven(found, nonce) else None

    def close(self) -> None:
        """Stop listening, and close the connections that are not authenticated."""
        self._is_closed = True
        self._acceptor.close()
        self._unproven.close()
        self._take_handed()
        self._proving.close()

    def _on_tensor_socket(self, sock: socket.socket, hello: Hello, nonce: bytes) -> None:
        """Answer the proof of a caller that has connected a socket for tensors by TLS."""
        credentials = self.proven(hello, nonce)
        _, purpose = read_number(hello.connection)
        if credentials is None or purpose == CALLS or self._is_closed:
            sock.close()
        else:
            self._take_socket(sock, credentials, hello, nonce)

    def start_session(
        self, transport: asyncio.Transport, credentials: Credentials, hello: Hello, nonce: bytes
    ) -> None:
        """Answer the caller's proof, and start the session of the connection."""
        connection, purpose = read_number(hello.connection)
        if purpose == CALLS:
            transport.write(hello.callee_proof(credentials, nonce))
            self._accept(credentials.caller, connection).start(transport)
        else:  # the transport has read no more than the hello
            self._take_socket(detach_socket(transport), credentials, hello, nonce)

    def _take_socket(
        self, sock: socket.socket, credentials: Credentials, hello: Hello, nonce: bytes
    ) -> None:
        """Answer the caller's proof at a socket for tensors, and use it."""
        connection, purpose = read_number(hello.connection)
        try:
            sock.sendall(hello.callee_proof(credentials, nonce))  # there is room in a new socket
        except OSError as exc:  # the caller has closed it
            log.debug("%s lost a socket for tensors: %r", self.addresses.unix, exc)
            sock.close()
        else:
            self._accept_socket(credentials.caller, connection, purpose, sock)


class _Unproven(asyncio.BufferedProtocol):
    """A connection until its caller is authenticated."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._buffer = bytearray(HELLO)
        self._size = 0
        self._nonce = new_nonce()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        opened = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._transport = opened
        peer = opened.get_extra_info("socket")
        is_unix = peer.family == socket.AF_UNIX
        if is_unix and not is_same_user(peer):
            opened.abort()
            return
        close_on_fork(opened)
        self._timer = asyncio.get_running_loop().call_later(PROOF_TIMEOUT, self.refuse, "no proof")
        opened.write(self._nonce)
        if self._listener._is_closed:
            self.refuse(LEFT)
        else:
            host = "" if is_unix else host_of(peer)
            self._listener._unproven.add(self, host, self.refuse)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._size :]

    def buffer_updated(self, nbytes: int) -> None:
        self._size += nbytes
        if self._size < HELLO or self._transport is None:
            return
        try:
            hello = Hello.load(bytes(self._buffer))
        except ValueError as exc:
            self.refuse(str(exc))
            return
        if (credentials := self._listener.proven(hello, self._nonce)) is None:
            self.refuse("a wrong proof")
            return
        self._end_handshake()
        self._listener.start_session(self._transport, credentials, hello, self._nonce)

    def refuse(self, reason: str) -> None:
        """Close the connection, and log the reason."""
        log.debug("%s refused a connection: %s", self._listener.addresses.unix, reason)
        self._end_handshake()
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_handshake()
        self._transport = None

    def _end_handshake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._listener._unproven.remove(self)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
