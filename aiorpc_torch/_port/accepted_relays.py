"""The connections of torch's that have come by a port: each goes on when another flow asks for it.

(tests/unit/port/test_lost_flows.py)
"""

import asyncio
import hashlib
import secrets
import socket
from collections.abc import Awaitable, Callable

from .relay import Relay
from .sequence import format_count, read_opening
from .strangers import Strangers
from .streams import PlainStream

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

Connect = Callable[[], Awaitable[socket.socket]]


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

    async def take_over(self, opening: bytes, connect: Connect) -> Relay | None:
        """Return the relay that a flow asks for, None if it is not known.

        Args:
            opening: the first bytes of the flow.
            connect: makes a connection with torch for a new one.
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
            await stream.send(READY + format_count(relay.sequence.received))
            is_closed = await relay.carry(stream, number)
        finally:
            if relay.is_over:
                self._drop(identity)
            else:
                self._keep(identity, host, is_closed=is_closed)

    def _keep(self, identity: bytes, host: str, *, is_closed: bool) -> None:
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
