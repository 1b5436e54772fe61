"""Ways for torch's RPC to workers on other hosts: a loopback socket for each, to that one's port.

torch connects to the address that it is given. The other end answers with the address at which it
listens itself, for further connections: at its own loopback interface, which is not to be reached
from here. So the answer is given the address of the loopback socket instead.
(TensorPipe of torch 2.11 to 2.15; tests/unit/port/test_tunnels.py, tests/network/test_one_port.py)
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable
from itertools import chain, repeat
from urllib.parse import urlsplit

from .._aio.sockets import Acceptor, closed_on_error, has_ended
from .port import Port, UnknownConnection, connect, prepare
from .purposes import TORCH
from .relay import END_SILENCE, TORCH_SILENCE, Relay, new_identity, receive_exactly
from .sequence import COUNT, Part, format_opening
from .streams import LINGER, PlainStream

log = logging.getLogger("aiorpc_torch")

# Seconds between attempts: a port with too many connections without proof closes some.
_RETRY_DELAYS = (0.01, 0.05, 0.1, 0.2, 0.5)
CONNECT_TIMEOUT = 1.0  # seconds: TCP tries again later and later, also once the link is whole
ATTEMPT_TIMEOUT = 5.0  # seconds for an attempt: a host that is frozen or cut off answers nothing
OPENING_TIMEOUT = 60.0  # seconds after which no attempt follows, if none was ever admitted
REFUSAL_TIMEOUT = 0.15  # seconds for a firewall that resets, and soon admits, connections
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

        Those from it end too, if nothing carries them.

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
    """A listening loopback socket, whose connections go to one worker."""

    def __init__(self, port: Port, peer: str, endpoint: str, address: str) -> None:
        parts = urlsplit(address)
        host, number = parts.hostname or "", parts.port or 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        own = self._listening.getsockname()[1]
        self.address = f"{parts.scheme}://{format_endpoint(host, own)}"
        self._old, self._new = format_endpoint(host, number), format_endpoint(host, own)
        self.failure = ""  # why the last connection that failed has
        self._port = port
        self._peer = peer
        self._endpoint = endpoint
        self._is_first = True
        self._acceptor: Acceptor | None = None
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}  # of its connections

    def start(self) -> None:
        """Take torch's connections until `close`. The first one asks for the address."""
        self._acceptor = self._port.accept_at(self._listening, self._accept)

    def close(self) -> None:
        """End the connections, and take no more."""
        self._port.relays.forget(self._endpoint)
        for task, accepted in self._tasks.items():
            with contextlib.suppress(OSError):  # for the other end, too
                accepted.shutdown(socket.SHUT_RDWR)
            asyncio.get_running_loop().call_later(LINGER, task.cancel)
        if self._acceptor is not None:
            self._acceptor.close()
        else:
            self._listening.close()

    def _accept(self, accepted: socket.socket) -> None:
        # All users of this machine reach this socket, as they reach torch's own port, which runs
        # their code in this process. So a bound in number would bound nothing.
        is_first, self._is_first = self._is_first, False
        prepare(accepted)
        task = self._port.start(self._pass(accepted, is_first))
        self._tasks[task] = accepted
        task.add_done_callback(lambda task: self._tasks.pop(task).close())  # it may not have begun

    async def _pass(self, accepted: socket.socket, is_first: bool) -> None:
        change = _readdressing(self._old, self._new) if is_first else None
        relay = Relay(accepted, self._port.heartbeat, change)
        identity, is_new, refusal = new_identity(self._port.endpoint), True, 0.0
        while not relay.is_over:
            opening = format_opening(identity, relay.sequence.received, is_new=is_new)
            try:
                with self._port.connecting():
                    found = await self._connect(accepted, opening, refusal, is_new=is_new)
                is_closed = await relay.carry(*found)
            except (OSError, ValueError) as exc:
                self.failure = str(exc)
                level = logging.WARNING if is_new else logging.DEBUG  # its loss is told elsewhere
                log.log(level, "no connection with worker %r: %s", self._peer, exc)
                return
            is_new = False
            # A process that is killed closes the flow in order. If its port refuses the next one,
            # or torch here has ended, nothing has to be waited for.
            is_gone = is_closed or relay.sequence.is_ended
            refusal = 0.0 if is_gone else REFUSAL_TIMEOUT

    async def _connect(
        self, accepted: socket.socket, opening: bytes, refusal: float, *, is_new: bool
    ) -> tuple[PlainStream, int]:
        """Return a flow, and how many bytes the other end has.

        Args:
            accepted: from torch, which needs the flow for its last bytes only once it has closed.
            opening: its first bytes.
            refusal: seconds for which the port may refuse connections.
            is_new: whether it is the first flow, which is given up sooner.

        Raises:
            OSError: the reason of the last attempt.
        """
        name, loop = f"worker {self._peer!r} at {self._endpoint}", asyncio.get_running_loop()
        begin = loop.time()
        deadline = begin + (OPENING_TIMEOUT if is_new else TORCH_SILENCE)
        for delay in chain(_RETRY_DELAYS, repeat(_RETRY_DELAYS[-1])):
            error: OSError
            try:
                async with asyncio.timeout(ATTEMPT_TIMEOUT):
                    return await self._attempt(name, opening)
            except TimeoutError:
                past = loop.time() - begin
                error = ConnectionResetError(
                    f"{name} has admitted no connection within {past:.3g} s"
                )
            except (ConnectionResetError, BrokenPipeError):
                error = ConnectionResetError(
                    f"{name} closes connections before it has admitted them"
                )
            except ConnectionRefusedError as exc:
                error, deadline = exc, min(deadline, begin + refusal)
            except OSError as exc:
                error = exc
                if is_new or isinstance(exc, UnknownConnection):
                    raise
            if has_ended(accepted):
                last = loop.time() + 2 * self._port.heartbeat + END_SILENCE
                deadline = min(deadline, last)
            if loop.time() >= deadline:
                raise error
            await asyncio.sleep(delay)
        raise AssertionError

    async def _attempt(self, name: str, opening: bytes) -> tuple[PlainStream, int]:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            connected = await connect(split_endpoint(self._endpoint))
        stream = await self._port.open(connected, TORCH, name, opening)
        with closed_on_error(connected):
            (count,) = COUNT.unpack(await receive_exactly(stream, COUNT.size))
        return stream, count


def _readdressing(old: str, new: str) -> Callable[[Part], Part]:
    """Return what replaces an address in the first message of a listener of TensorPipe.

    Other bytes than such a message may wait there for more: torch's RPC does not understand them.
    """
    first: bytes | None = b""  # what has come of the first message

    def change(data: Part) -> Part:
        nonlocal first
        if first is None:
            return data
        whole = first + data
        size = message_size(whole)
        if size is not None and len(whole) < size:
            first = whole
            return b""
        first = None
        return whole if size is None else replace_address(whole[:size], old, new) + whole[size:]

    return change


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


def format_endpoint(host: str, number: int) -> str:
    """Return address and port as one text, as TensorPipe writes it too."""
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return the arguments of `format_endpoint`."""
    host, _, number = endpoint.rpartition(":")
    return host.strip("[]"), int(number)
