"""One end of a connection of torch's between two ports, which outlives the flows that carry it.

torch never replaces a connection that has ended, and a router or a firewall may lose one whose
worker lives. So torch's own socket stays open at each end, while the flow between the ports is
replaced. `Sequence` decides what is sent again, and when a flow is dead. Callbacks carry, not
tasks: small messages would take twice the time.
(tests/unit/port/test_lost_flows.py, tests/network/test_lost_flows.py)
"""

import asyncio
import contextlib
import hashlib
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable

from .sequence import COUNT, TICKS, Part, Sequence, read_opening
from .strangers import Strangers
from .streams import CHUNK, LINGER, PlainStream

SHORTEST_TICK = 0.1  # seconds: a busy machine answers later than after a few milliseconds
MANY = 16  # parts that are given to the system at once
_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER

_NOTHING = False, False, False, False

Change = Callable[[Part], Part]
"""Returns other bytes in place of some, b"" if it needs more."""


class Relay:
    """Passes bytes between torch's socket and one flow after another. On one event loop.

    Args:
        local: torch's socket, or one that is connected to it. Its owner closes it.
        heartbeat: seconds within which a dead flow is noticed.
        change: of the bytes for torch, None for none.
    """

    def __init__(
        self, local: socket.socket, heartbeat: float, change: Change | None = None
    ) -> None:
        self.local = local
        self.sequence = Sequence()
        self.is_over = False  # True if all has passed, or nobody is left to read it
        self._tick = max(heartbeat / TICKS, SHORTEST_TICK)
        self._change = change
        self._loop = asyncio.get_running_loop()
        self._undelivered: list[Part] = []  # to torch; of one read at most
        self._is_last = False  # the other end's bytes end with those
        self._is_delivered = False  # torch knows it, or reads no more
        self._is_ending = False  # one direction has ended
        self._owner: asyncio.Task[object] | None = None
        # Of the flow:
        self._lost: asyncio.Future[bool] | None = None
        self._stream: PlainStream
        self._unsent: list[Part] = []  # which it has not taken yet
        self._timer: asyncio.TimerHandle
        self._watched = _NOTHING

    async def take_over(self) -> None:
        """Make the running task the only one that carries: the flow of another one is lost."""
        task = asyncio.current_task()
        while (owner := self._owner) is not None and owner is not task:
            owner.cancel()
            await asyncio.wait((owner,))
            if self._owner is owner:  # no other task was quicker
                self._owner = None
        self._owner = task

    async def carry(self, stream: PlainStream, number: int) -> bool:
        """Pass bytes by a flow until it is lost, or all is over; close it then.

        Return whether the other end has closed it in order. A process that is killed does.

        Args:
            stream: the flow, after the handshake.
            number: bytes that the other end has.

        Raises:
            ValueError: if that cannot be.
        """
        with stream.sock:
            self.sequence.resume(number)
            self._stream, self._unsent = stream, []
            lost: asyncio.Future[bool] = self._loop.create_future()
            self._lost = lost
            self._wait_for_tick()
            self._step(self._receive, None)
            try:
                return await lost
            finally:
                self._lost = None
                self._timer.cancel()
                self._watch(_NOTHING)
                self.is_over |= self._is_ending  # nobody reads what is lost now

    def _lose(self, *, is_closed: bool = False) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(is_closed)

    def _step(self, step: Callable[..., None], *args: bytes | None) -> None:
        """Do a step, send what is due, and wait for what is possible next."""
        if self._lost is None or self._lost.done():
            return
        try:
            step(*args)
            self._send()
        except OSError:
            self._lose()
        except ValueError:  # the other end breaks the rules
            self.is_over = True
            self._lose()
        else:
            is_held, is_full = bool(self._undelivered), bool(self._unsent)
            may_take = self.sequence.has_room and not is_full
            wanted = may_take, is_held, not is_held, is_full
            if wanted != self._watched and not self._lost.done():
                self._watch(wanted)
                if is_held and self._timer.when() > self._loop.time() + SHORTEST_TICK:
                    self._timer.cancel()
                    self._wait_for_tick()

    def _watch(self, wanted: tuple[bool, bool, bool, bool]) -> None:
        """Wait until torch's socket may be read or written, and the same of the flow."""
        loop, local, flow = self._loop, self.local, self._stream.sock
        was, self._watched = self._watched, wanted
        for number, (sock, step) in enumerate(
            ((local, self._take), (local, self._deliver), (flow, self._read), (flow, _nothing))
        ):
            if wanted[number] and not was[number]:
                add = loop.add_writer if number % 2 else loop.add_reader
                add(sock, self._step, step)
            elif was[number] and not wanted[number]:
                remove = loop.remove_writer if number % 2 else loop.remove_reader
                remove(sock)

    # ── to the other end ────────────────────────────────────────────────────────────────────────

    def _take(self) -> None:
        """Take what torch has sent, or its end."""
        try:
            data = self.local.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.sequence.put(data)

    def _send(self) -> None:
        stream = self._stream
        while parts := self._unsent or self.sequence.next():
            sealed = self._unsent or stream.sealed(parts)
            self._unsent = _send_some(stream.sock, sealed)
            if self._unsent:
                return
        if self._is_delivered and self.sequence.is_ended:
            self.is_over = True
            self._lose()

    # ── to torch ────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._receive(self._stream.sock.recv(CHUNK))

    def _receive(self, data: bytes | None) -> None:
        """Take bytes of the flow, b"" at its end; None for what its handshake has left."""
        received = self._stream.unsealed(data)
        if received:
            found = self.sequence.feed(received)
            self._is_last |= self.sequence.is_over
            if self._change is not None:
                found = [changed for each in found if (changed := self._change(each))]
            if not self._is_delivered:
                self._undelivered += [b"".join(found)] if len(found) > MANY else found
                self._deliver()
        elif received is not None:
            # If all has arrived, the other end needs no further flow to give it to torch.
            self._is_ending |= self.sequence.has_arrived
            self._lose(is_closed=True)

    def _deliver(self) -> None:
        """Give torch what has come; the rest is given later, perhaps after the next flow."""
        try:
            if self._undelivered:
                self._undelivered = _send_some(self.local, self._undelivered)
            if self._is_last and not self._undelivered and not self._is_delivered:
                self.local.shutdown(socket.SHUT_WR)
                self._is_delivered = True
        except OSError:  # torch has closed it
            self._undelivered, self._is_delivered = [], True
        if self._is_delivered and not self._is_ending:  # let the other direction end too
            self._is_ending = True
            self._loop.call_later(LINGER, self._lose)

    # ── its end ─────────────────────────────────────────────────────────────────────────────────

    def _wait_for_tick(self) -> None:
        # The other end may have a shorter heartbeat. It is not heard while torch takes nothing, so
        # it is told more often that this one lives.
        seconds = SHORTEST_TICK if self._undelivered else self._tick
        self._timer = self._loop.call_later(seconds, self._on_tick)

    def _on_tick(self) -> None:
        if self.sequence.tick(is_reading=not self._undelivered):
            self._wait_for_tick()
            self._step(_nothing)
        else:  # not in order, as a process that ends closes it
            self._stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._lose()


def _nothing() -> None:
    pass


def _send_some(sock: socket.socket, parts: list[Part]) -> list[Part]:
    """Send what the system takes; return the rest."""
    try:
        sent = sock.sendmsg(parts)
    except BlockingIOError:
        return parts
    for number, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part)[sent:], *parts[number + 1 :]]
        sent -= len(part)
    return []


async def receive_exactly(stream: PlainStream, size: int) -> bytes:
    """Return so many bytes, and no more.

    Raises:
        ConnectionResetError: if the stream ends before.
    """
    received = b""
    while len(received) < size:
        if not (data := await stream.receive(size - len(received))):
            raise ConnectionResetError("it has ended")
        received += data
    return received


# ── relays of connections that have come ────────────────────────────────────────────────────────

READY, UNKNOWN = b"+", b"-"
"""Sent by the end that was connected to: it admits the other one, or it does not know what that
goes on with."""

TORCH_SILENCE = 900.0
"""Seconds for which a connection of torch's outlives the last flow: about what TCP has by default.
torch never replaces one, so a link may be cut for that long."""

END_SILENCE = 10.0
"""Seconds, beside two heartbeats, if that flow was closed in order: its process has probably ended,
and if not, it opens another one within a heartbeat."""

MAX_WITHOUT_FLOW = 1024
"""Connections without a flow; beyond it the oldest one of the host with the most is closed."""

MAX_WITHOUT_FLOW_IN_CLEAR = 256
"""The same without TLS, where any host can leave some behind. Each takes two files."""

_OF_PORT = 8  # bytes of an identity that tell whose connection it is


def new_identity(endpoint: str) -> bytes:
    """Return the identity of a new connection of torch's, which the port there opens."""
    return _of_port(endpoint) + secrets.token_bytes(16 - _OF_PORT)


def _of_port(endpoint: str) -> bytes:
    return hashlib.blake2b(endpoint.encode(), digest_size=_OF_PORT).digest()


class AcceptedRelays:
    """The relays of one port by their identities, which no other host can guess. On its loop."""

    def __init__(self, heartbeat: float, *, is_in_clear: bool) -> None:
        self._heartbeat = heartbeat
        self._all: dict[bytes, Relay] = {}
        limit = MAX_WITHOUT_FLOW_IN_CLEAR if is_in_clear else MAX_WITHOUT_FLOW
        self._without_flow = Strangers(limit)
        self._timers: dict[bytes, asyncio.TimerHandle] = {}

    async def take_over(
        self, opening: bytes, connect: Callable[[], Awaitable[socket.socket]]
    ) -> Relay | None:
        """Return the relay that the `opening` of a flow asks for, None if it is not known.

        `connect` makes a connection with torch for a new one.
        """
        identity, is_new, _ = read_opening(opening)
        if identity not in self._all and is_new:
            local = await connect()
            if identity in self._all:
                local.close()
            else:
                self._all[identity] = Relay(local, self._heartbeat)
        if (relay := self._all.get(identity)) is None:
            return None
        await relay.take_over()
        self._without_flow.remove(identity)
        if (timer := self._timers.pop(identity, None)) is not None:
            timer.cancel()
        return relay if self._all.get(identity) is relay else None

    async def carry(self, relay: Relay, stream: PlainStream, opening: bytes, host: str) -> None:
        """Carry until the flow is lost, then keep what is not over, for some time."""
        identity, _, number = read_opening(opening)
        is_closed = False
        try:
            await stream.send(READY + COUNT.pack(relay.sequence.received))
            is_closed = await relay.carry(stream, number)
        finally:
            if relay.is_over:
                self._drop(identity)
            else:
                seconds = 2 * self._heartbeat + END_SILENCE if is_closed else TORCH_SILENCE
                self._without_flow.add(identity, host, lambda _: self._drop(identity))
                loop = asyncio.get_running_loop()
                self._timers[identity] = loop.call_later(seconds, self._drop, identity)

    def _drop(self, identity: bytes) -> None:
        self._without_flow.remove(identity)
        if (timer := self._timers.pop(identity, None)) is not None:
            timer.cancel()
        if (relay := self._all.pop(identity, None)) is not None:
            relay.local.close()

    def forget(self, endpoint: str) -> None:
        """Close those without a flow that a port has opened, whose process has ended."""
        for identity in [*self._timers]:
            if identity.startswith(_of_port(endpoint)):
                self._drop(identity)

    def close(self) -> None:
        """Close all of them. None has a flow any more."""
        for identity in [*self._all]:
            self._drop(identity)
