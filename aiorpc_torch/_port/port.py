"""The one TCP port of a worker, and its event loop in a daemon thread.

A user's event loop that is blocked delays no introduction, ping or message of torch's RPC, since
they pass here. Connections for calls and tensors do not: their sockets are handed over as soon as
their first bytes tell what they are for. Those for calls by TLS are handed over after the
handshake. It costs as much as several calls, and strangers may ask for many.
(tests/unit/port/test_port.py)
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from .._aio.flows import end_when_silent, probe_when_idle, retry_soon
from .._aio.fork import close_on_fork
from .._aio.loops import LoopThread, await_on, call_soon
from .._aio.sockets import BACKLOG, Acceptor, closed_on_error
from .purposes import (
    CALLS,
    DIRECTORY,
    MAX_FIRST,
    PREFACE,
    TENSORS,
    TORCH,
    HelloReader,
    preface,
    read_preface,
    server_name,
)
from .relay import READY, UNKNOWN, AcceptedRelays, receive_exactly
from .sequence import OPENING
from .strangers import Strangers
from .streams import LINGER, PlainStream, TlsStream, splice
from .tls import Tls, TlsError

log = logging.getLogger("aiorpc_torch")

MAX_UNPROVEN = 64  # connections without proof at once; beyond it one is closed
PROOF_TIMEOUT = 5.0  # seconds until a connection has proven itself
MAX_WARNINGS = 64  # reasons for refusals that are logged as warnings
CERTIFICATE_INTERVAL = 60.0  # seconds between two looks at the certificate, without connections

_ALERT = b"\x15\x03\x03\x00\x02\x02\x0a"
"""A fatal alert of TLS: an unexpected message."""

DIRECTORY_SILENCE = 120.0
"""Seconds after which a connection to the directory ends if the other end acknowledges nothing: its
clients connect again. The other ones have no such limit: their owners judge silence."""

Accepted = Callable[..., object]
"""Takes a connected socket, on the event loop of the port. By TLS it takes more: for calls the
settings by which asyncio uses that socket, for the directory the address of the host."""


class UnknownConnection(ConnectionError):
    """The other end does not know the connection that is to go on: its process is another one."""


class Port:
    """A listening socket for all purposes, and what passes through its loop. For any thread.

    Args:
        host: the address to listen at.
        number: the port, 0 for a random one.
        tls: the certificate; None for connections in clear text.
        heartbeat: seconds within which a dead flow of torch's RPC is noticed (default: 10).

    Raises:
        OSError: if the port is in use; the message names it.
    """

    def __init__(self, host: str, number: int, tls: Tls | None, heartbeat: float = 10.0) -> None:
        self.tls = tls
        self.heartbeat = heartbeat
        listening = _listen(host, number)
        self.host, self.number = listening.getsockname()[:2]
        self.torch: tuple[str, int] | None = None
        """Address of this worker's own listener of torch's RPC, once there is one."""
        self._handlers: dict[str, Accepted] = {}
        self._acceptors: weakref.WeakSet[Acceptor] = weakref.WeakSet()
        self._of_directory: list[Acceptor] = []
        self._hellos = HelloReader()
        self._strangers = Strangers(MAX_UNPROVEN)
        self.relays = AcceptedRelays(heartbeat, is_in_clear=tls is None)
        self._warned: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting: set[asyncio.Task[Any]] = set()
        self._thread = LoopThread("aiorpc-port", partial(self._serve, listening))
        self._loop = self._thread.loop
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Return address and port, as others reach it."""
        return f"[{self.host}]:{self.number}" if ":" in self.host else f"{self.host}:{self.number}"

    def serve(self, purpose: str, accepted: Accepted) -> None:
        """Hand over connections: the socket.

        For the directory by TLS: one end of a socket pair, and the address of the other host.
        """
        self._handlers[purpose] = accepted

    def listen_for_directory(self, listening: Sequence[socket.socket]) -> None:
        """Accept connections to the directory at further sockets too."""
        for each in listening:
            if not self.call(partial(self._add, each, DIRECTORY)):
                each.close()

    def end_directory(self) -> None:
        """Accept no more connections to the directory, which ends."""

        def close() -> None:
            while self._of_directory:
                self._of_directory.pop().close()

        self._handlers.pop(DIRECTORY, None)
        call_soon(self._loop, close)

    async def secure(self, connected: socket.socket, purpose: str, peer: str) -> socket.socket:
        """Return a socket from which all goes through that one, in TLS. On any event loop.

        Raises:
            TlsError: if one end refuses the other.
            OSError: if the connection ends before.
        """

        async def splice_on_loop() -> socket.socket:
            stream = await self.open(connected, purpose, peer)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self.start(splice(stream, PlainStream(ours)))
            return theirs

        return await await_on(self._loop, splice_on_loop())

    def call(self, step: Callable[[], object]) -> bool:
        """Run a step on the loop of this port; return False if the port is closed."""
        try:
            self._loop.call_soon_threadsafe(step)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def close(self) -> None:
        """Close all sockets, once what passes through has ended, or after `LINGER`."""
        self._thread.close(2 * LINGER)

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    async def _serve(self, listening: socket.socket) -> None:
        self._add(listening, None)
        if self.tls is not None:
            self._look_at(self.tls)
        await self._thread.closing.wait()
        for acceptor in self._acceptors:
            acceptor.close()
        self._strangers.close()
        for task in self._connecting:
            task.cancel()
        if self._tasks:  # the last messages of the directory
            await asyncio.wait(self._tasks, timeout=LINGER)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.relays.close()

    def _look_at(self, tls: Tls) -> None:
        tls.look()
        self._loop.call_later(CERTIFICATE_INTERVAL, self._look_at, tls)

    def _add(self, listening: socket.socket, purpose: str | None) -> None:
        found = self.accept_at(listening, lambda accepted: self._accept(accepted, purpose))
        if purpose == DIRECTORY:
            self._of_directory.append(found)

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """End the running task in this block if the port is closed: nothing passes through yet."""
        task = asyncio.current_task()
        assert task is not None
        self._connecting.add(task)
        try:
            yield
        finally:
            self._connecting.discard(task)

    def accept_at(self, listening: socket.socket, accepted: Accepted) -> Acceptor:
        """Accept connections at a further socket, until this port or the acceptor is closed."""
        found = Acceptor("the port", accepted)
        found.add(listening)
        self._acceptors.add(found)
        if self._thread.closing.is_set():
            found.close()
        return found

    def start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Return a task with a connection, which is cancelled by `close`."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _accept(self, accepted: socket.socket, purpose: str | None) -> None:
        prepare(accepted)
        try:
            host = str(accepted.getpeername()[0])
        except OSError:  # it is closed already
            accepted.close()
            return

        def on_end(task: asyncio.Task[None]) -> None:
            self._strangers.remove(task)
            if task.cancelled():  # it may not have begun
                accepted.close()

        task = self.start(self._admit(accepted, host, purpose))
        self._strangers.add(task, host, task.cancel)
        task.add_done_callback(on_end)

    async def _admit(self, accepted: socket.socket, host: str, only: str | None) -> None:
        """Find out what a connection is for; let it pass, or hand it over."""
        try:
            async with asyncio.timeout(PROOF_TIMEOUT):
                purpose = await self._purpose_of(accepted)
                if only not in (None, purpose):
                    raise ValueError(f"only a {only} is here")
                if purpose != TORCH and (self.tls is None or purpose == TENSORS):
                    handler = self._handler(purpose)
                    if purpose == DIRECTORY:
                        accepted.send(READY)  # there is room in a new socket
                    handler(accepted)
                    return
                if purpose == CALLS:
                    handler = self._handler(purpose)
                    handler(accepted, (await self._secured(accepted)).settings())
                    return
                stream = await self._secured(accepted) if self.tls else PlainStream(accepted)
                _limit_silence(accepted, purpose)
                passing = await self._passing(purpose, stream, host)
        except (OSError, ValueError) as exc:  # also a TimeoutError
            self.log_refusal(host, exc)
            if self.tls is not None and isinstance(exc, ValueError):
                _send_alert(accepted)
            accepted.close()
            return
        # Without TLS a connection of torch's proves nothing, and still counts no more: a member's
        # must not be closed in favour of others.
        self._strangers.remove(asyncio.current_task())
        with accepted, contextlib.suppress(OSError, ValueError):
            await passing

    async def _passing(
        self, purpose: str, stream: PlainStream, host: str
    ) -> Coroutine[Any, Any, None]:
        """Find the other end of what passes; return the coroutine that lets it pass."""
        if purpose == DIRECTORY:
            handler = self._handler(DIRECTORY)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            handler(theirs, host)

            async def pass_to_directory() -> None:
                with ours:
                    with contextlib.suppress(OSError):
                        await stream.send(READY)
                    # The directory closes what it refuses: that would be counted by nothing
                    # meanwhile.
                    await splice(stream, PlainStream(ours), linger=0.0)

            return pass_to_directory()
        opening = await receive_exactly(stream, OPENING)
        if (relay := await self.relays.take_over(opening, self._connect_torch)) is None:
            await stream.send(UNKNOWN)
            raise ConnectionResetError("it goes on with a connection that is not known here")
        return self.relays.carry(relay, stream, opening, host)

    async def _purpose_of(self, accepted: socket.socket) -> str:
        pause, needed = 0.001, MAX_FIRST if self.tls else PREFACE
        read = self._hellos.read if self.tls else read_preface
        while True:
            try:
                data = accepted.recv(needed, socket.MSG_PEEK)
            except BlockingIOError:
                data = b""
            else:
                if not data:
                    raise ConnectionResetError("it has ended")
            if (purpose := read(data)) is not None:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        if self.tls is None:
            accepted.recv(PREFACE)
        return purpose

    async def _secured(self, accepted: socket.socket) -> TlsStream:
        assert self.tls is not None
        stream = TlsStream(accepted, self.tls.server)
        with self.tls.explaining("the other end"):
            try:
                await stream.handshake()
            except ssl.SSLEOFError as exc:
                raise ConnectionResetError("it has ended") from exc
        return stream

    async def _connect_torch(self) -> socket.socket:
        if self.torch is None:
            raise ConnectionRefusedError("torch's RPC has not started")
        return await connect(self.torch)

    def _handler(self, purpose: str) -> Accepted:
        if (found := self._handlers.get(purpose)) is None:
            raise ConnectionRefusedError(f"no {purpose} here")
        return found

    def log_refusal(self, host: str, exc: Exception) -> None:
        """Log why a connection from a host was refused: a certificate as a warning, once."""
        text = f"refused a connection from {host}: {exc}"
        is_new = text not in self._warned and len(self._warned) < MAX_WARNINGS
        if isinstance(exc, TlsError) and is_new:
            self._warned.add(text)
            log.warning(text)
        else:
            log.debug("refused a connection from %s: %r", host, exc)

    # ── connections to others ───────────────────────────────────────────────────────────────────

    async def open(
        self, connected: socket.socket, purpose: str, peer: str, opening: bytes = b""
    ) -> PlainStream:
        """Ask for a purpose at a connected socket, and wait until it is admitted. On the loop.

        Raises the exceptions of `secure`, and `UnknownConnection`. The socket is closed then.
        `peer` names the other end in messages; `opening` is that of a flow (`sequence`).
        """
        with closed_on_error(connected):
            prepare(connected)
            _limit_silence(connected, purpose)
            with nullcontext() if self.tls is None else self.tls.explaining(peer):
                if self.tls is None:
                    stream = PlainStream(connected)
                    await stream.send(preface(purpose))
                else:
                    stream = secured = TlsStream(connected, self.tls.client, server_name(purpose))
                    await secured.handshake()
                if opening:
                    await stream.send(opening)
                ready = await stream.receive(1)
            if ready == UNKNOWN:
                raise UnknownConnection(f"{peer} does not know the connection")
            if ready != READY:
                raise ConnectionResetError(f"{peer} has closed the connection")
        return stream


def _limit_silence(connected: socket.socket, purpose: str) -> None:
    if purpose == DIRECTORY:
        end_when_silent(connected, DIRECTORY_SILENCE)
    retry_soon(connected)


def _send_alert(accepted: socket.socket) -> None:
    """Tell a client without TLS that it needs it. Bytes left unread would reset the connection."""
    with contextlib.suppress(OSError):
        accepted.recv(MAX_FIRST)
        accepted.send(_ALERT)


def prepare(connected: socket.socket) -> None:
    """Let a TCP socket be one of an event loop, for messages that are small and rare."""
    close_on_fork(connected)
    connected.setblocking(False)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    probe_when_idle(connected)


async def connect(address: tuple[str, int]) -> socket.socket:
    """Return a socket that is connected."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with closed_on_error(socket.socket(family)) as found:
        prepare(found)
        await asyncio.get_running_loop().sock_connect(found, address)
    return found


def _listen(host: str, number: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, number), family=family, backlog=BACKLOG)
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise
        text = (
            f"port {number} of {host} is in use by another process: each worker of a host needs a "
            "port= of its own"
        )
        raise OSError(exc.errno, text) from exc
