"""How a caller comes to a connection: torch RPC introduces it, then both sides prove themselves."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable
from typing import Any, cast

from .._protocol import endpoints
from .._protocol.exceptions import Failure
from .._protocol.handshake import (
    NONCE,
    PROOF,
    Addresses,
    Credentials,
    Party,
    hello,
    is_answered,
    load_introduction,
    network_namespace,
    new_nonce,
)
from .._protocol.messages import dump
from .._torch.compat import WorkerInfo
from .._torch.transport import send, transport_error, wrap_future
from ..errors import NotServing, RpcError

Introduction = tuple[Credentials, Addresses]

DIAL = 5.0  # seconds for the network to accept a connection
# Seconds between attempts. A listener that strangers keep busy closes connections for a moment.
_PAUSES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, *[0.5] * 20)


class Introductions:
    """The introductions of one process to its peers, kept for all its loops."""

    def __init__(self, me: Party) -> None:
        self._me = me
        self._known: dict[tuple[str, int], Introduction] = {}
        self._namespace = network_namespace()

    def __repr__(self) -> str:
        return f"<Introductions of {self._me.name} to {[name for name, _ in self._known]}>"

    async def connect(self, peer: WorkerInfo, link: int) -> asyncio.Transport:
        """Return a connection to `peer`, which both sides have proven.

        Raises:
            WorkerLost: if torch RPC does not reach the peer.
            NotServing: if the peer does not serve.
            RpcError: if its listener does not answer; the message names the address.
        """
        failure: Exception | None = None
        for pause in _PAUSES:
            credentials, addresses = await self._introduction(peer)
            address = self._address(addresses)
            try:
                return await _dial(address, credentials, link)
            except (OSError, TimeoutError) as exc:
                if isinstance(failure, TimeoutError) and isinstance(exc, TimeoutError):
                    break  # a firewall, say
                failure = exc
                self._known.pop((peer.name, peer.id), None)  # it may be of a listener that is gone
            await asyncio.sleep(pause)
        raise RpcError(
            f"worker {peer.name!r} does not answer at {_in_words(address)}: {failure!r}. "
            "Let this worker reach that address and port"
        ) from failure

    async def _introduction(self, peer: WorkerInfo) -> Introduction:
        known = self._known.get((peer.name, peer.id))
        if known is not None:
            return known
        data = dump((self._me.name, self._me.number))
        try:
            answer = await wrap_future(send(peer, endpoints.introduce, data))
        except Exception as exc:
            raise transport_error(exc, peer.name) from None
        if isinstance(answer, Failure):
            answer.get()
        found = self._known[peer.name, peer.id] = load_introduction(answer)
        return found

    def _address(self, addresses: Addresses) -> str | tuple[str, int]:
        if addresses.namespace and addresses.namespace == self._namespace:
            return addresses.unix
        if addresses.tcp is None:
            raise NotServing("the peer listens in another network namespace only")
        return addresses.tcp


def _in_words(address: str | tuple[str, int]) -> str:
    if isinstance(address, str):
        return f"the abstract Unix socket {address}"
    return f"TCP address {address[0]}, port {address[1]}"


async def _dial(
    address: str | tuple[str, int], credentials: Credentials, link: int
) -> asyncio.Transport:
    loop = asyncio.get_running_loop()
    make: Callable[[], Any] = functools.partial(_Handshake, credentials, link)
    transport: asyncio.Transport
    async with asyncio.timeout(DIAL):
        if isinstance(address, str):
            transport, protocol = await loop.create_unix_connection(make, sock=_connected(address))
        else:
            transport, protocol = await loop.create_connection(make, *address)
    try:
        await protocol.proven  # a callee whose loop is busy takes its time, and is not lost
    except BaseException:
        transport.abort()
        raise
    return transport


def _connected(name: str) -> socket.socket:
    """Return a socket that is connected to an abstract Unix socket.

    Not by asyncio: where the backlog is full, its connection seems to succeed and the first write
    fails. Here `connect` says so at once.
    """
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        unix.setblocking(False)
        unix.connect(f"\0{name}")
    except BaseException:
        unix.close()
        raise
    return unix


class _Handshake(asyncio.Protocol):
    """The caller's side of a connection until the callee has proven itself."""

    def __init__(self, credentials: Credentials, link: int) -> None:
        self.proven: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._credentials = credentials
        self._link = link
        self._mine = new_nonce()
        self._received = b""
        self._is_sent = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._received += data
        theirs, proof = self._received[:NONCE], self._received[NONCE:]
        if len(theirs) == NONCE and not self._is_sent and self._transport is not None:
            self._is_sent = True
            self._transport.write(hello(self._credentials, self._link, theirs, self._mine))
        if len(proof) < PROOF or self.proven.done():
            return
        if is_answered(self._credentials, self._link, theirs, self._mine, proof):
            self.proven.set_result(None)
        else:
            self._fail(ConnectionError("the listener does not know the secret"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("closed before its proof"))

    def _fail(self, exc: Exception) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            self.proven.set_exception(exc)
            self.proven.exception()  # who waits may have gone
