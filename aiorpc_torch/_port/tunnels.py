"""Ways for torch's RPC to workers on other hosts: a loopback socket for each, to that one's port.

torch connects to the address that it is given. The other end answers with the address at which it
listens itself, for further connections: at its own loopback interface, which is not to be reached
from here. So the answer is given the address of the loopback socket instead.
(TensorPipe of torch 2.11 to 2.15; tests/unit/port/test_tunnels.py, tests/network/test_one_port.py)
"""

import asyncio
import logging
import socket
import struct
from urllib.parse import urlsplit

from .._aio.acceptor import Acceptor
from .port import Port, connect, prepare
from .purposes import TORCH
from .streams import PlainStream, splice

log = logging.getLogger("aiorpc_torch")

# Seconds between attempts: a port with too many connections without proof closes some.
_RETRY_DELAYS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
ATTEMPT_TIMEOUT = 10.0  # seconds for an attempt: a host that is frozen or cut off answers nothing
_BACKLOG = 16
_LENGTH = struct.Struct("<Q")  # precedes each message of TensorPipe
_STRING = 0xBD  # precedes the length of a short string and the string
MAX_ANSWER = 1 << 16  # bytes of a message that is read whole


class Tunnels:
    """The ways from one worker's port to those of others. For any thread."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._open: dict[str, _Tunnel] = {}

    def open(self, peer: str, endpoint: str, address: str) -> str:
        """Return the address at which torch's RPC of this process reaches a worker.

        Nothing listens there once the port is closed.

        Args:
            peer: its name.
            endpoint: its port, as `Port.endpoint` tells it.
            address: the address of its own torch RPC.
        """
        self.close(peer)
        tunnel = self._open[peer] = _Tunnel(self._port, peer, endpoint, address)
        if not self._port.call(tunnel.start):
            tunnel.close()
        return tunnel.address

    def close(self, peer: str) -> None:
        """End the connections to a worker, and take no more: its process was replaced, say.

        A process that is frozen may still have a system that acknowledges what is sent. No limit of
        silence ends its connections then.
        """
        tunnel = self._open.pop(peer, None)
        if tunnel is not None and not self._port.call(tunnel.close):
            tunnel.close()

    def failure(self, peer: str) -> str:
        """Return why a worker was not reached last, "" if that is unknown."""
        tunnel = self._open.get(peer)
        return "" if tunnel is None else tunnel.failure


class _Tunnel:
    """A listening loopback socket, whose connections go to one worker.

    Attributes:
        failure: why the last connection that failed has, "" before.
    """

    def __init__(self, port: Port, peer: str, endpoint: str, address: str) -> None:
        parts = urlsplit(address)
        host, number = parts.hostname or "", parts.port or 0
        self._listening = _listen(host)
        own = self._listening.getsockname()[1]
        self.address = f"{parts.scheme}://{format_endpoint(host, own)}"
        self._old, self._new = format_endpoint(host, number), format_endpoint(host, own)
        self.failure = ""
        self._port = port
        self._peer = peer
        self._endpoint = endpoint
        self._is_first = True
        self._acceptor: Acceptor | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # of its connections

    def start(self) -> None:
        """Take torch's connections until `close`. The first one asks for the address."""
        self._acceptor = self._port.accept_at(self._listening, self._accept)

    def close(self) -> None:
        """End the connections, and take no more."""
        for task in self._tasks:
            task.cancel()
        if self._acceptor is not None:
            self._port.end_accepting(self._acceptor)
        else:
            self._listening.close()

    def _accept(self, accepted: socket.socket) -> None:
        # All users of this machine reach this socket, as they reach torch's own port, which runs
        # their code in this process. So a bound in number would bound nothing.
        is_first, self._is_first = self._is_first, False
        prepare(accepted)
        task = self._port.start(self._pass(accepted, is_first), accepted)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass(self, accepted: socket.socket, is_first: bool) -> None:
        try:
            stream = await self._connect()
        except OSError as exc:
            self.failure = str(exc)
            log.warning("no connection with worker %r: %s", self._peer, exc)
            return
        local = PlainStream(accepted)
        await splice(local, _Readdressed(stream, self._old, self._new) if is_first else stream)

    async def _connect(self) -> PlainStream:
        name, reason = f"worker {self._peer!r} at {self._endpoint}", ""
        for delay in _RETRY_DELAYS:
            try:
                async with asyncio.timeout(ATTEMPT_TIMEOUT):
                    return await self._attempt(name)
            except TimeoutError:
                reason = f"has admitted no connection within {ATTEMPT_TIMEOUT:g} s"
            except (ConnectionResetError, BrokenPipeError):
                reason = "closes connections before it has admitted them"
            await asyncio.sleep(delay)
        raise ConnectionResetError(f"{name} {reason}")

    async def _attempt(self, name: str) -> PlainStream:
        host, number = split_endpoint(self._endpoint)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connected = await connect(asyncio.get_running_loop(), family, (host, number))
        return await self._port.open(connected, TORCH, name)


class _Readdressed(PlainStream):
    """A stream from a listener of TensorPipe, in whose first message an address is replaced."""

    def __init__(self, stream: PlainStream, old: str, new: str) -> None:
        super().__init__(stream.sock)
        self._stream = stream
        self._old, self._new = old, new
        self._first: bytes | None = b""  # what has come of the first message

    async def receive(self, limit: int = MAX_ANSWER) -> bytes:
        while self._first is not None:
            data = await self._stream.receive()
            self._first += data
            if not data or (size := message_size(self._first)) is None:
                found, self._first = self._first, None
                return found
            if len(self._first) >= size:
                found, rest = self._first[:size], self._first[size:]
                self._first = None
                return replace_address(found, self._old, self._new) + rest
        return await self._stream.receive(limit)

    async def send(self, data: bytes) -> None:
        await self._stream.send(data)

    def end(self) -> None:
        self._stream.end()


def message_size(data: bytes) -> int | None:
    """Return the bytes of the message that begins so, None if it is no answer of a listener."""
    if len(data) < _LENGTH.size:
        return _LENGTH.size
    size: int = _LENGTH.unpack_from(data)[0]
    return _LENGTH.size + size if size <= MAX_ANSWER else None


def replace_address(message: bytes, old: str, new: str) -> bytes:
    """Return a message of TensorPipe with another address in it."""
    before, after = (bytes((_STRING, len(each))) + each.encode() for each in (old, new))
    body = message[_LENGTH.size :].replace(before, after, 1)
    return _LENGTH.pack(len(body)) + body


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)


def format_endpoint(host: str, number: int) -> str:
    """Return address and port as one text, as TensorPipe writes it too."""
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return the arguments of `format_endpoint`."""
    host, _, number = endpoint.rpartition(":")
    return host.strip("[]"), int(number)
