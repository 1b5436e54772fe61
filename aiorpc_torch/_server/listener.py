"""The listening sockets of a worker: an abstract Unix socket and, for remote peers, a TCP port.

A connection becomes a session once its caller has proven that torch RPC gave it the credentials.
Until then the connection has a fixed buffer and a time limit, and the number of such connections is
limited. (tests/loopback/test_connections.py)
"""

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

from .._aio.fork import close_on_fork
from .._protocol.channel import Channel
from .._protocol.handshake import (
    HELLO,
    Addresses,
    Credentials,
    Hello,
    Party,
    network_namespace,
    new_nonce,
)

log = logging.getLogger("aiorpc_torch")

MAX_UNPROVEN = 64  # unauthenticated connections; beyond it the oldest is closed
PROOF_TIMEOUT = 5.0  # seconds
BACKLOG = 128
_UCRED = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_OVERFLOW = "/proc/sys/kernel/overflowuid"

Accept = Callable[[Party, int], Channel]
"""Makes the session of a caller's connection with that number."""


class Listener:
    """The listening sockets of one worker, and the credentials that it gave to callers."""

    def __init__(self, me: Party, accept: Accept) -> None:
        self._me = me
        self._accept = accept
        self._servers: list[asyncio.Server] = []
        self._credentials: dict[bytes, Credentials] = {}
        self._introduced: dict[Party, Credentials] = {}
        self._unproven: dict[_Unproven, None] = {}  # oldest first
        self.addresses = Addresses(network_namespace(), "")

    @classmethod
    async def start(cls, me: Party, host: str | None, accept: Accept) -> "Listener":
        """Listen on a new abstract Unix socket, and on a TCP port of `host` if it is given."""
        listener = cls(me, accept)
        try:
            await listener._listen(host)
        except BaseException:  # a cancellation, for one
            listener.close()
            raise
        return listener

    async def _listen(self, host: str | None) -> None:
        name = f"aiorpc-{secrets.token_hex(16)}"
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(f"\0{name}")
        await self._serve(unix)
        tcp = None
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            inet = socket.socket(family, socket.SOCK_STREAM)
            inet.bind((host, 0))
            tcp = host, int(inet.getsockname()[1])
            await self._serve(inet)
        self.addresses = Addresses(network_namespace(), name, tcp)

    async def _serve(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        close_on_fork(listening)
        loop = asyncio.get_running_loop()
        options: Any = {"sock": listening, "backlog": BACKLOG, "start_serving": False}
        make = lambda: _Unproven(self)  # noqa: E731
        if listening.family == socket.AF_UNIX:
            server = await loop.create_unix_server(make, **options)
        else:
            server = await loop.create_server(make, **options)
        # asyncio suspends here, with the socket open: `close` must know it already.
        self._servers.append(server)
        await server.start_serving()

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
        """Stop listening."""
        for server in self._servers:
            server.close()
        for each in [*self._unproven]:
            each.refuse("this worker leaves")

    def add_unproven(self, unproven: "_Unproven") -> None:
        """Add an unauthenticated connection, and close the oldest beyond `MAX_UNPROVEN`.

        A member proves itself within milliseconds, so strangers cannot keep members out.
        """
        while len(self._unproven) >= MAX_UNPROVEN:
            next(iter(self._unproven)).refuse("too many unauthenticated connections")
        self._unproven[unproven] = None

    def remove_unproven(self, unproven: "_Unproven") -> None:
        """Remove a connection that is authenticated or closed."""
        self._unproven.pop(unproven, None)

    def start_session(
        self, transport: asyncio.Transport, credentials: Credentials, hello: Hello, nonce: bytes
    ) -> None:
        """Answer the caller's proof, and start the session of the connection."""
        transport.write(hello.callee_proof(credentials, nonce))
        self._accept(credentials.caller, hello.connection).start(transport)


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
        if not _is_same_user(opened):
            opened.abort()
            return
        self._listener.add_unproven(self)
        close_on_fork(opened)
        self._timer = asyncio.get_running_loop().call_later(PROOF_TIMEOUT, self.refuse, "no proof")
        opened.write(self._nonce)

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


def _is_same_user(transport: asyncio.Transport) -> bool:
    """Return False for a Unix socket of another user; the handshake checks all others."""
    peer = transport.get_extra_info("socket")
    if peer.family != socket.AF_UNIX:
        return True
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    uid: int = _UCRED.unpack(data)[1]
    return uid == os.getuid() or uid == _overflow_uid()


def _overflow_uid() -> int:
    """Return the user id that stands for users of other user namespaces."""
    try:
        with open(_OVERFLOW) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65534
