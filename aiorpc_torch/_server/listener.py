"""Where callers connect: an abstract Unix socket, and TCP if a peer is in another namespace.

A connection becomes a session once its caller has proven that this worker was introduced to it by
torch RPC. Until then it gets a fixed buffer and a few seconds, and there are only so many of them.
(tests/test_connections.py)
"""

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import cast

from .._aio.fork import keep_from_children
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

UNPROVEN = 64  # connections at once whose caller has proven nothing; of more the oldest is closed
PATIENCE = 5.0  # seconds for the proof
BACKLOG = 128
_UCRED = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_OVERFLOW = "/proc/sys/kernel/overflowuid"

Accept = Callable[[Party, int], Channel]
"""Makes the session of a caller's link."""


class Listener:
    """The listening sockets of one worker, and whom it was introduced to."""

    def __init__(self, me: Party, accept: Accept) -> None:
        self._me = me
        self._accept = accept
        self._servers: list[asyncio.Server] = []
        self._credentials: dict[bytes, Credentials] = {}
        self._introduced: dict[Party, Credentials] = {}
        self._unproven: dict[_Unproven, None] = {}  # the oldest first
        self.addresses = Addresses(network_namespace(), "")

    def __repr__(self) -> str:
        return f"<Listener {self.addresses.unix}, {len(self._unproven)} unproven>"

    @classmethod
    async def start(cls, me: Party, host: str | None, accept: Accept) -> "Listener":
        """Listen on a new abstract Unix socket, and on a port of `host` if it is given."""
        listener = cls(me, accept)
        name = f"aiorpc-{secrets.token_hex(16)}"
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(f"\0{name}")
        await listener._serve(unix)
        tcp = None
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            inet = socket.socket(family, socket.SOCK_STREAM)
            inet.bind((host, 0))
            tcp = host, int(inet.getsockname()[1])
            await listener._serve(inet)
        listener.addresses = Addresses(network_namespace(), name, tcp)
        return listener

    async def _serve(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        keep_from_children(listening)
        loop = asyncio.get_running_loop()
        make = lambda: _Unproven(self)  # noqa: E731
        if listening.family == socket.AF_UNIX:
            server = await loop.create_unix_server(make, sock=listening, backlog=BACKLOG)
        else:
            server = await loop.create_server(make, sock=listening, backlog=BACKLOG)
        self._servers.append(server)

    def introduce(self, caller: Party) -> tuple[Credentials, Addresses]:
        """Return what that caller's process needs to connect: always the same."""
        known = self._introduced.get(caller)
        if known is None:
            known = self._introduced[caller] = Credentials(caller, self._me)
            self._credentials[known.key] = known
        return known, self.addresses

    def forget(self, caller: str) -> None:
        """Accept no more connections of the processes that were introduced by that name."""
        for party in [each for each in self._introduced if each.name == caller]:
            del self._credentials[self._introduced.pop(party).key]

    def find(self, key: bytes) -> Credentials | None:
        """Return the credentials of an introduction."""
        return self._credentials.get(key)

    def close(self) -> None:
        """Listen no more."""
        for server in self._servers:
            server.close()
        for each in [*self._unproven]:
            each.refuse("the worker leaves")

    def admit(self, unproven: "_Unproven") -> None:
        """Let one more connection prove its caller; the oldest of too many is closed.

        A caller proves itself in milliseconds, so strangers cannot keep its place.
        """
        while len(self._unproven) >= UNPROVEN:
            next(iter(self._unproven)).refuse("too many at once")
        self._unproven[unproven] = None

    def settle(self, unproven: "_Unproven") -> None:
        """Forget a connection that has proven its caller, or has gone."""
        self._unproven.pop(unproven, None)

    def begin(
        self, transport: asyncio.Transport, credentials: Credentials, hello: Hello, nonce: bytes
    ) -> None:
        """Answer a proof, and make the connection a session."""
        transport.write(hello.answer(credentials, nonce))
        self._accept(credentials.caller, hello.link).start(transport)


class _Unproven(asyncio.BufferedProtocol):
    """A connection until its caller has proven who it is."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._buffer = bytearray(HELLO)
        self._size = 0
        self._nonce = new_nonce()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        opened = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport = opened
        if not _is_ours(opened):
            opened.abort()
            return
        self._listener.admit(self)
        keep_from_children(opened)
        self._timer = asyncio.get_running_loop().call_later(PATIENCE, self.refuse, "no proof")
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
        self._end()
        self._listener.begin(self._transport, credentials, hello, self._nonce)

    def refuse(self, why: str) -> None:
        """Close the connection of a stranger."""
        log.debug("%r closes a connection: %s", self._listener, why)
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._transport = None

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._listener.settle(self)


def _is_ours(transport: asyncio.Transport) -> bool:
    """Return whether a Unix connection is of this user; others prove who they are."""
    peer = transport.get_extra_info("socket")
    if peer.family != socket.AF_UNIX:
        return True
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    uid: int = _UCRED.unpack(data)[1]
    return uid == os.getuid() or uid == _overflow_uid()


def _overflow_uid() -> int:
    """Return the number that stands for users of another user namespace."""
    try:
        with open(_OVERFLOW) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65534
