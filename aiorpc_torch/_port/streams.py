"""Bytes over one socket, in clear or by TLS, and their way between two sockets.

asyncio's own TLS closes a connection whose certificate it refuses without telling the other end
why. This one tells. (tests/unit/port/test_streams.py)
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .sequence import Part

T = TypeVar("T")


CHUNK = 1 << 18  # bytes that are read at once
RECORD = 1 << 14  # bytes in a record of TLS
LINGER = 1.0  # seconds for the other direction to end


class PlainStream:
    """A connected socket, which does not block."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def receive(self, limit: int = CHUNK) -> bytes:
        """Return the next bytes, b"" at the end."""
        return await self._loop.sock_recv(self.sock, limit)

    async def send(self, data: bytes) -> None:
        """Send bytes. One task may send while another one receives."""
        await self._loop.sock_sendall(self.sock, data)

    def sealed(self, parts: list[Part]) -> list[Part]:
        """Return the bytes of the socket that bring these to the other end."""
        return parts

    def unsealed(self, data: bytes | None) -> bytes | None:
        """Return what bytes of the socket bring, b"" at the end, None if it is not whole yet.

        Without `data` (None) what `receive` has left.
        """
        return data


class TlsStream(PlainStream):
    """A socket with TLS, after `handshake`. `name` is the server's, None at the server."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, name: str | None = None
    ) -> None:
        super().__init__(sock)
        self._received, self._unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._sending = asyncio.Lock()
        self._tls = context.wrap_bio(
            self._received, self._unsent, server_side=name is None, server_hostname=name
        )

    async def handshake(self) -> None:
        """Prove both ends. A client learns with the first bytes it receives whether it is refused.

        Raises:
            ssl.SSLError: if one end refuses the other.
        """
        await self._step(self._tls.do_handshake)

    def settings(self) -> ssl.SSLContext:
        """Return settings by which asyncio goes on with the socket, on any event loop.

        This object is not used any more then.
        """
        return _Settings(partial(_GoingOn, self._tls, self._received, self._unsent))

    async def receive(self, limit: int = CHUNK) -> bytes:
        try:
            return await self._step(lambda: self._read(limit))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    async def send(self, data: bytes) -> None:
        self._tls.write(data)
        await self._flush()

    def sealed(self, parts: list[Part]) -> list[Part]:
        is_small = sum(map(len, parts)) < RECORD
        for part in (b"".join(parts),) if is_small else parts:
            self._tls.write(part)
        return [self._unsent.read()]

    def unsealed(self, data: bytes | None) -> bytes | None:
        if data:
            self._received.write(data)
        elif data is not None:
            self._received.write_eof()
        try:
            return self._read(self._received.pending + CHUNK)
        except ssl.SSLWantReadError:
            return None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    def _read(self, limit: int) -> bytes:
        """Return all that is there: OpenSSL gives a record at a time."""
        parts = [self._tls.read(min(limit, RECORD))]
        with contextlib.suppress(ssl.SSLError):  # the next call raises it again
            while parts[-1] and (limit := limit - len(parts[-1])):
                parts.append(self._tls.read(min(limit, RECORD)))
        return b"".join(parts)

    async def _step(self, step: Callable[[], T]) -> T:
        while True:
            try:
                found = step()
            except ssl.SSLWantReadError:
                await self._flush()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    await self._flush()  # the reason
                raise
            else:
                await self._flush()
                return found
            if data := await self._loop.sock_recv(self.sock, CHUNK):
                self._received.write(data)
            else:
                self._received.write_eof()

    async def _flush(self) -> None:
        if self._unsent.pending:
            async with self._sending:
                await self._loop.sock_sendall(self.sock, self._unsent.read())


class _Settings(ssl.SSLContext):
    """Settings of one connection whose handshake is done: asyncio has no other way to get it."""

    _go_on: Callable[[ssl.MemoryBIO, ssl.MemoryBIO], Any]

    def __new__(cls, *_: object) -> "_Settings":
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, go_on: Callable[[ssl.MemoryBIO, ssl.MemoryBIO], Any]) -> None:
        self._go_on = go_on

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *_: Any, **__: Any) -> Any:
        return self._go_on(incoming, outgoing)


class _GoingOn:
    """An `ssl.SSLObject` after its handshake, with the buffers of asyncio before its own."""

    def __init__(
        self,
        tls: ssl.SSLObject,
        received: ssl.MemoryBIO,
        unsent: ssl.MemoryBIO,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
    ) -> None:
        self._tls, self._received, self._unsent = tls, received, unsent
        self._incoming, self._outgoing = incoming, outgoing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tls, name)

    def do_handshake(self) -> None:
        """Return at once: it is done."""

    def pending(self) -> int:
        """Return how many bytes may be read: uvloop reads no more often than this is true."""
        return self._tls.pending() + self._received.pending

    def read(self, *args: Any) -> Any:
        if self._incoming.pending:
            self._received.write(self._incoming.read())
        return self._step(self._tls.read, *args)

    def write(self, data: Any) -> int:
        return self._step(self._tls.write, data)

    def unwrap(self) -> Any:
        self._received.write(self._incoming.read())
        return self._step(self._tls.unwrap)

    def _step(self, step: Callable[..., T], *args: Any) -> T:
        try:
            return step(*args)
        finally:
            if self._unsent.pending:
                self._outgoing.write(self._unsent.read())


async def splice(one: PlainStream, other: PlainStream, linger: float = LINGER) -> None:
    """Send what either receives by the other, until one has ended for `linger` seconds, or both.

    Both sockets are closed then.
    """
    copies = [asyncio.ensure_future(_copy(*pair)) for pair in ((one, other), (other, one))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(copies, timeout=linger)
    finally:
        for each in copies:
            each.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        one.sock.close()
        other.sock.close()


async def _copy(source: PlainStream, target: PlainStream) -> None:
    with contextlib.suppress(OSError):
        while data := await source.receive():
            await target.send(data)
    with contextlib.suppress(OSError):  # nothing follows
        target.sock.shutdown(socket.SHUT_WR)
