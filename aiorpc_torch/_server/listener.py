"""The listening sockets of a worker: an abstract Unix socket and, for remote peers, a TCP port.

A connection becomes a session once its caller has proven that torch RPC gave it the credentials.
Until then the connection has a fixed buffer and a time limit, and the number of such connections is
limited. (tests/loopback/test_connections.py)
"""

import asyncio
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from .._aio.acceptor import Acceptor
from .._aio.detach import detach_socket
from .._aio.fork import close_on_fork
from .._aio.unix_sockets import BACKLOG, is_same_user, listen_unix
from .._protocol.channel import Channel
from .._wire.handshake import (
    CALLS,
    HELLO,
    Addresses,
    Credentials,
    Hello,
    Party,
    network_namespace,
    new_nonce,
    read_number,
)

log = logging.getLogger("aiorpc_torch")

MAX_UNPROVEN = 64  # unauthenticated connections; beyond it one is closed
PROOF_TIMEOUT = 5.0  # seconds

Accept = Callable[[Party, int], Channel]
"""Makes the session of a caller's connection with that number."""

AcceptSocket = Callable[[Party, int, int, socket.socket], None]
"""Takes a socket for tensors of that connection, and its purpose."""


class Listener:
    """The listening sockets of one worker, and the credentials that it gave to callers."""

    def __init__(
        self, me: Party, host: str | None, accept: Accept, accept_socket: AcceptSocket
    ) -> None:
        """Listen on a new abstract Unix socket, and on a TCP port of `host` if it is given."""
        self._me = me
        self._accept = accept
        self._accept_socket = accept_socket
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(f"worker {me.name!r}", self._open)
        self._opening: dict[asyncio.Task[Any], socket.socket] = {}
        self._is_closed = False
        self._credentials: dict[bytes, Credentials] = {}
        self._introduced: dict[Party, Credentials] = {}
        self._unproven: dict[_Unproven, None] = {}  # oldest first
        try:
            self.addresses = self._listen(host)
        except BaseException:
            self.close()
            raise

    def _listen(self, host: str | None) -> Addresses:
        name = f"aiorpc-{secrets.token_hex(16)}"
        self._acceptor.add(listen_unix(name))
        tcp = None if host is None else self._listen_tcp(host)
        return Addresses(network_namespace(), name, tcp)

    def _listen_tcp(self, host: str) -> tuple[str, int]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        inet = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._acceptor.add(inet)
        return host, int(inet.getsockname()[1])

    def listen_at(self, host: str) -> None:
        """Listen on a TCP port of `host` from now on, unless this worker listens on one."""
        if self.addresses.tcp is None and not self._is_closed:
            self.addresses = replace(self.addresses, tcp=self._listen_tcp(host))

    def _open(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: _Unproven(self), accepted)
        )
        self._opening[opening] = accepted
        opening.add_done_callback(self._on_opened)

    def _on_opened(self, opening: asyncio.Task[Any]) -> None:
        accepted = self._opening.pop(opening)
        if opening.cancelled() or opening.exception() is not None:
            accepted.close()

    def introduce(self, caller: Party) -> tuple[Credentials, Addresses]:
        """Return the credentials and addresses for a caller; the same at each request."""
        known = self._introduced.get(caller)
        if known is None:
            known = self._introduced[caller] = Credentials(caller, self._me)
            self._credentials[known.key] = known
        return known, self.addresses

    def revoke(self, caller: str) -> None:
        """Revoke the credentials of all processes of the worker `caller`."""
        for party in [each for each in self._introduced if each.name == caller]:
            del self._credentials[self._introduced.pop(party).key]

    def find(self, key: bytes) -> Credentials | None:
        """Return the credentials with that key, None if there are none."""
        return self._credentials.get(key)

    def close(self) -> None:
        """Stop listening, and close the connections that are not authenticated."""
        self._is_closed = True
        self._acceptor.close()
        for unproven in [*self._unproven]:
            unproven.refuse("this worker leaves")

    def add_unproven(self, unproven: "_Unproven") -> None:
        """Add an unauthenticated connection; beyond `MAX_UNPROVEN` close one of the busiest host.

        Of that host's connections the oldest is closed: a member proves itself within milliseconds,
        and strangers at one host do not close the connections of members at others. A connection
        that comes after `close` is closed.
        """
        if self._is_closed:
            unproven.refuse("this worker has left")
            return
        while len(self._unproven) >= MAX_UNPROVEN:
            self._surplus().refuse("too many unauthenticated connections")
        self._unproven[unproven] = None

    def _surplus(self) -> "_Unproven":
        hosts = Counter(each.host for each in self._unproven)
        busiest = max(hosts, key=hosts.__getitem__)
        return next(each for each in self._unproven if each.host == busiest)

    def remove_unproven(self, unproven: "_Unproven") -> None:
        """Remove a connection that is authenticated or closed."""
        self._unproven.pop(unproven, None)

    def start_session(
        self, transport: asyncio.Transport, credentials: Credentials, hello: Hello, nonce: bytes
    ) -> None:
        """Answer the caller's proof, and start the session of the connection."""
        proof = hello.callee_proof(credentials, nonce)
        connection, purpose = read_number(hello.connection)
        if purpose == CALLS:
            transport.write(proof)
            self._accept(credentials.caller, connection).start(transport)
            return
        sock = detach_socket(transport)  # which has read no more than the hello
        sock.send(proof)  # there is room for it in a new socket
        self._accept_socket(credentials.caller, connection, purpose, sock)


class _Unproven(asyncio.BufferedProtocol):
    """A connection until its caller is authenticated.

    Attributes:
        host: IP address of the caller, "" for this network namespace.
    """

    def __init__(self, listener: Listener) -> None:
        self.host = ""
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
        if peer.family != socket.AF_UNIX:
            address = opened.get_extra_info("peername")
            self.host = address[0] if address else "?"  # closed already
        elif not is_same_user(peer):
            opened.abort()
            return
        close_on_fork(opened)
        self._timer = asyncio.get_running_loop().call_later(PROOF_TIMEOUT, self.refuse, "no proof")
        opened.write(self._nonce)
        self._listener.add_unproven(self)

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
        credentials = self._listener.find(hello.key)
        if credentials is None or not hello.is_proven(credentials, self._nonce):
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
        self._listener.remove_unproven(self)
