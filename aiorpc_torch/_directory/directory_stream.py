"""A stream of messages between a worker and the directory, in either direction.

Both ends greet at once, so another program at the other end is recognized, and its own clients get
few bytes. A message is its length and its bytes. A reader bounds the length, and reserves nothing
for what is only declared.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .._aio.flows import probe_when_idle
from .._wire.plain import dump

M = TypeVar("M")

_NAME, _PROTOCOL = b"aiorpc:", b"1"
ANY_WORLD = "-" * 32
"""In place of the id of a world: a worker that does not know it meets any."""
_TLS_ALERT = b"\x15"
_LENGTH = struct.Struct("<I")
LINGER = 0.5  # seconds for the last messages to be sent


class NoDirectoryError(ValueError):
    """Another program listens, or another version of this library."""

    @classmethod
    def of(cls, first: bytes) -> "NoDirectoryError":
        """Return the error for the first bytes of what listens, which are no greeting of ours."""
        if first.startswith(_TLS_ALERT):
            return cls("it uses TLS, and this worker has no tls=: give it all or none")
        if first.startswith(_NAME):
            return cls("it runs another version of aiorpc_torch")
        return cls("it is no program of aiorpc_torch")


def greeting(world: str = ANY_WORLD) -> bytes:
    """Return the first bytes of either end: `world` is that of the directory, or the one wanted."""
    return _NAME + _PROTOCOL + world.encode()


def encode(message: Any) -> bytes:
    """Return the bytes of a message, with its length."""
    data = dump(message)
    return _LENGTH.pack(len(data)) + data


class Stream(Generic[M]):
    """A connected stream. Use `open_stream`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        read: Callable[[bytes], M],
        limit: int,
    ) -> None:
        self._reader, self._writer, self._read = reader, writer, read
        self.limit = limit  # bytes of a message that is received

    @property
    def is_open(self) -> bool:
        """Return whether neither end has closed the connection, as far as is known."""
        return not self._writer.is_closing() and not self._reader.at_eof()

    @property
    def unsent(self) -> int:
        """Return the number of bytes that the system has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Send bytes, after all that was sent before."""
        if not self._writer.is_closing():
            self._writer.write(data)

    def send(self, message: Any) -> None:
        self.write(encode(message))

    async def read_greeting(self) -> str:
        """Wait for the greeting of the other end; return the id of its world. Raises
        NoDirectoryError if it is another program, or speaks another version, EOFError or OSError if
        the connection ends.
        """
        # No more than is wrong: another program may have sent less, and wait for an answer.
        if (first := await self._reader.readexactly(1)) == _NAME[:1]:
            first += await self._reader.readexactly(len(_NAME) - 1)
        if first != _NAME or await self._reader.readexactly(1) != _PROTOCOL:
            raise NoDirectoryError.of(first)
        return (await self._reader.readexactly(len(ANY_WORLD))).decode("ascii", "replace")

    async def receive(self) -> M:
        """Wait for the next message. Raises ValueError if it is malformed, EOFError at the end."""
        [length] = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if length > self.limit:
            raise ValueError(f"a message of {length} bytes")
        return self._read(await self._reader.readexactly(length))

    def abort(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send what waits, for at most `LINGER` seconds, and close the connection."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LINGER):
                await self._writer.wait_closed()
        self.abort()


async def open_stream(
    connected: socket.socket, read: Callable[[bytes], M], limit: int
) -> Stream[M]:
    """Return the stream of a connected socket; `limit` is in bytes of a message received."""
    connected.setblocking(False)
    try:
        if connected.family == socket.AF_UNIX:
            reader, writer = await asyncio.open_unix_connection(sock=connected)
        else:
            probe_when_idle(connected)
            reader, writer = await asyncio.open_connection(sock=connected)
    except BaseException:
        connected.close()
        raise
    return Stream(reader, writer, read, limit)
