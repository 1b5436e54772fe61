"""Opening a connection: an introduction by torch RPC, then a handshake that both sides prove."""

import asyncio
import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

from .._aio.deadlines import in_seconds
from .._aio.host import network_namespace
from .._aio.sockets import connect_unix, detach_socket
from .._aio.threads import run_in_thread
from .._aio.waiting import LOG_DELAY, announced
from .._endpoint import entry_points
from .._peers.peers import Peer, Peers
from .._port.dialer import Address, Dialer, receive_exactly
from .._port.tls import TlsError
from .._text import printable
from .._torch.transport import classify_error, send, wrap_future
from .._wire.exceptions import RemoteFailure
from .._wire.handshake import (
    NONCE,
    PROOF,
    Credentials,
    Introduction,
    encode_hello,
    is_callee_proven,
    load_introduction,
    new_nonce,
)
from .._wire.plain import dump
from ..errors import WorkerLeft, WorkerUnreachable

Start = Callable[[asyncio.Transport, bytes], None]
"""Starts a connection on its transport, with the first bytes that were received."""

DIAL_TIMEOUT = 5.0  # seconds for the network to accept a connection
PROOF_TIMEOUT = 5.0  # seconds for the proof of a listener whose event loop is not busy
# Seconds between attempts. A listener with too many unproven connections closes new ones.
_RETRY_DELAYS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, *[0.5] * 20)

_UNPROVEN = "the listener did not prove the secret"


class Holding(Protocol):
    """Decides whether calls wait for a peer that does not serve yet: `_node.attachments`.

    `timeout` is the seconds for which a call is held at most.
    """

    @property
    def timeout(self) -> float: ...
    def is_held(self, peer: str) -> bool: ...
    async def wait_until_serving(self, peer: Peer) -> int: ...
    async def on_refused(self, peer: Peer, epoch: int) -> None: ...


def held_too_long(holding: Holding, peer: str, seconds: float) -> WorkerUnreachable:
    """Return the error of a call that was held for `seconds`."""
    is_held = holding.is_held(peer)
    reason = "it is not attached" if is_held else "it has not answered an introduction"
    remedy = ". Enter attach() there" if is_held else ""
    return WorkerUnreachable(peer, f"{reason} after {in_seconds(seconds)}{remedy}")


class Introductions:
    """The introductions of one process to its peers, for all its event loops.

    Without `holding`, calls of peers that do not serve yet fail. The `dialer` is for workers with
    one port each.
    """

    def __init__(
        self, members: Peers, holding: Holding | None = None, dialer: Dialer | None = None
    ) -> None:
        self.holding = holding
        self._dialer = dialer
        self._tls = None if dialer is None else dialer.tls
        self._members = members
        self._namespace = network_namespace()

    async def connect(self, peer: Peer, connection: int, start: Start) -> None:
        """Open a connection to `peer`; call `start` when its handshake is done.

        Raises:
            WorkerLost: if torch RPC does not reach the peer.
            WorkerLeft: if the peer does not serve.
            WorkerUnreachable: if its listener does not answer; the reason names its address.
        """

        async def introduce_again() -> None:
            peer.introduction = None
            await self._introduced(peer)

        async def open_(address: Address, credentials: Credentials) -> None:
            await _dial(address, credentials, connection, start, introduce_again, self._dialer)

        await self._reach(peer, open_)

    async def _reach(
        self, peer: Peer, open_: Callable[[Address, Credentials], Awaitable[None]]
    ) -> None:
        """Introduce this process to `peer`, and open a connection."""
        failure: Exception | None = None
        for delay in _RETRY_DELAYS:
            address, credentials = await self._introduced(peer)
            try:
                await open_(address, credentials)
                return
            except TlsError as exc:
                raise WorkerUnreachable(peer.name, str(exc)) from exc
            except (OSError, TimeoutError) as exc:
                if self._tls is not None and self._tls.expired and not isinstance(address, str):
                    # The refusal of the own certificate is only the connection's end.
                    raise WorkerUnreachable(peer.name, self._tls.expired) from exc
                if isinstance(failure, TimeoutError) and isinstance(exc, TimeoutError):
                    break  # a firewall, for one
                failure = exc
                if isinstance(exc, ConnectionError):  # the listener may be closed
                    peer.introduction = None
            await asyncio.sleep(delay)
        if isinstance(address, str):
            where = f"the abstract Unix socket {printable(address)}"
        else:
            where = f"TCP address {printable(address[0])}, port {address[1]}"
        raise WorkerUnreachable(
            peer.name,
            f"it does not answer at {where}: {failure!r}. Open that address and port for this "
            "worker",
        ) from failure

    async def dial(self, peer: Peer, number: int) -> socket.socket:
        """Return a proven socket to `peer`, for the purpose in the number of its hello.

        Raises the exceptions of `connect`.
        """
        found: list[socket.socket] = []
        dialer = self._dialer

        async def open_(address: Address, credentials: Credentials) -> None:
            assert dialer is not None
            assert not isinstance(address, str)
            found.append(await dial_in_thread(dialer, address, credentials, number, DIAL_TIMEOUT))

        try:
            if self._tls is not None and not isinstance((await self._introduced(peer))[0], str):
                await self._reach(peer, open_)
            else:
                take = lambda opened, _: found.append(detach_socket(opened))  # noqa: E731
                await self.connect(peer, number, take)
        except BaseException:
            for each in found:  # cancelled at this moment
                each.close()
            raise
        return found[0]

    async def _introduced(self, peer: Peer) -> tuple[Address, Credentials]:
        """Return where `peer` listens, and what both ends prove; wait until it serves."""
        found: Introduction | None = None
        while found is None:
            epoch = 0
            if self.holding is not None:
                text = f"calls to worker {peer.name!r} wait until it is in attach()"
                with announced(text, logging.WARNING, LOG_DELAY):
                    epoch = await self.holding.wait_until_serving(peer)
            try:
                found = await self._introduction(peer)
            except WorkerLeft:  # meanwhile
                if self.holding is None:
                    raise
                await self.holding.on_refused(peer, epoch)
        credentials, addresses = found
        if addresses.namespace and addresses.namespace == self._namespace:
            return addresses.unix, credentials
        if addresses.tcp is None:
            raise WorkerUnreachable(peer.name, "it listens in another network namespace only")
        return addresses.tcp, credentials

    async def _introduction(self, peer: Peer) -> Introduction:
        if peer.introduction is not None:
            return peer.introduction
        me = self._members.me
        data = dump((me.name, me.worker_id))
        try:
            answer = await wrap_future(send(peer.member.info, entry_points.introduce, data))
        except Exception as exc:
            address = self._members.address_elsewhere(peer)
            raise classify_error(exc, peer.name, address) from None
        if isinstance(answer, RemoteFailure):
            answer.raise_()
        found = peer.introduction = load_introduction(answer)
        return found


async def _dial(
    address: Address,
    credentials: Credentials,
    connection: int,
    start: Start,
    introduce: Callable[[], Awaitable[object]],
    dialer: Dialer | None = None,
) -> None:
    loop = asyncio.get_running_loop()
    factory: Callable[[], Any] = functools.partial(_Handshake, credentials, connection, start)
    transport: asyncio.Transport
    async with asyncio.timeout(DIAL_TIMEOUT):
        if isinstance(address, str):
            transport, protocol = await loop.create_unix_connection(
                factory, sock=connect_unix(address)
            )
        elif dialer is not None:
            transport, protocol = await dialer.transport(factory, address)
        else:
            transport, protocol = await loop.create_connection(factory, *address)
    try:
        with contextlib.nullcontext() if dialer is None else dialer.explaining(address):
            await _wait_for_proof(protocol.proven, introduce)
    except BaseException:
        transport.abort()
        raise


async def _wait_for_proof(
    proven: "asyncio.Future[None]", introduce: Callable[[], Awaitable[object]]
) -> None:
    """Wait for the proof of the listener.

    A callee whose event loop is busy is not lost, however long. It does not answer introductions
    meanwhile. If it answers one and no proof comes, another program listens at its old address.

    Raises:
        TimeoutError: if another program listens there.
    """
    await asyncio.wait({proven}, timeout=PROOF_TIMEOUT)
    if not proven.done():
        introducing = asyncio.ensure_future(introduce())
        try:
            either: set[asyncio.Future[Any]] = {proven, introducing}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not proven.done():
                await introducing
                await asyncio.wait({proven}, timeout=PROOF_TIMEOUT)
        finally:
            introducing.cancel()
    if not proven.done():
        raise TimeoutError("the listener has sent no proof")
    proven.result()


class _Handshake(asyncio.Protocol):
    """The caller's side of the handshake of a connection.

    Args:
        credentials: secrets of the introduction.
        connection: number of the connection.
        start: sets the transport's next protocol, and gets what has followed the handshake. The
            read that ends the handshake calls it, so that it misses neither frames nor the end.
    """

    def __init__(self, credentials: Credentials, connection: int, start: Start) -> None:
        self.proven: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._credentials = credentials
        self._connection = connection
        self._start = start
        self._nonce = new_nonce()
        self._received = b""
        self._is_sent = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        self._received += data
        peer_nonce, proof = self._received[:NONCE], self._received[NONCE : NONCE + PROOF]
        if len(peer_nonce) == NONCE and not self._is_sent and self._transport is not None:
            self._is_sent = True
            self._transport.write(
                encode_hello(self._credentials, self._connection, peer_nonce, self._nonce)
            )
        if len(proof) < PROOF or self.proven.done() or self._transport is None:
            return
        if is_callee_proven(self._credentials, self._connection, peer_nonce, self._nonce, proof):
            self.proven.set_result(None)
            self._start(self._transport, self._received[NONCE + PROOF :])
        else:
            self._fail(ConnectionError(_UNPROVEN))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("closed before the handshake was done"))

    def _fail(self, exc: Exception) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            self.proven.set_exception(exc)
            self.proven.exception()  # its waiter may have been cancelled


async def dial_in_thread(
    dialer: Dialer, address: tuple[str, int], credentials: Credentials, number: int, timeout: float
) -> socket.socket:
    """Return a proven socket for tensors, with TLS. `number` is that of its hello.

    Raises:
        TlsError: if one end refuses the other's certificate.
        OSError: if there is no connection, or no proof within `timeout`.
    """
    is_abandoned = threading.Event()

    def work() -> socket.socket:
        found = dialer.tensor_socket(address, timeout)
        try:
            theirs, mine = receive_exactly(found, NONCE), new_nonce()
            found.sendall(encode_hello(credentials, number, theirs, mine))
            proof = receive_exactly(found, PROOF)
            if not is_callee_proven(credentials, number, theirs, mine, proof):
                raise ConnectionError(_UNPROVEN)
            if is_abandoned.is_set():
                raise ConnectionAbortedError("it is not wanted any more")
        except BaseException:
            found.close()
            raise
        return found

    try:
        return await run_in_thread(work, "aiorpc-connect")
    except asyncio.CancelledError:
        is_abandoned.set()
        raise
