"""A warning of calls that have waited for long, with the lines at which they stand.

Calls that a running call has made are shown with it, in the log of its caller.
"""

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from .._aio.loops import call_soon
from .._client.connection import Connection
from .._client.pool import Outgoing
from .._client.stream_reader import StreamReader
from .._node.node import Node
from .._wire.ancestry import BATCH
from .._wire.targets import call_name
from .._wire.where import IDLE, CallNode, Limits, Standings, standings_of

log = logging.getLogger("aiorpc_torch")

LONG = 10.0  # seconds
QUIET = 600.0  # seconds between two warnings of one method at one worker
MOST = 4  # calls in a warning
LOOKED_AT = 64  # of the oldest calls of a connection
LIMITS = Limits(16, 1.0)
_MAX_NAMES = 1024  # methods that are remembered


class LongWaits:
    """Warns of the calls of this process that wait for long: not of streams, and once of each.

    `look` at any rate, in one thread. While no call waits for long, a look is at the oldest call of
    each connection.
    """

    def __init__(self, worker: Node) -> None:
        self._pool, self._sessions = worker.pool, worker.server.sessions
        self._seen: WeakKeyDictionary[Connection, int] = WeakKeyDictionary()  # last numbers
        self._warned: dict[tuple[str, str], float] = {}

    def look(self, now: float) -> None:
        """Warn of calls that wait for long since the last look."""
        for loop, connection in self._pool.connections():
            oldest = connection.oldest(1)
            if not oldest or now - oldest[0][1].started <= LONG:
                continue
            found: list[int] = []
            last = self._seen.get(connection, -1)
            for each in connection.oldest(LOOKED_AT):
                call = Outgoing(loop, connection, *each)
                if now - call.receiver.started <= LONG or call.number <= last:
                    continue
                if len(found) == MOST:  # the others follow at the next look
                    break
                self._seen[connection] = call.number
                if self._is_loud(call, now):
                    found.append(call.number)
            if found:
                call_soon(loop, connection.questions.ask, found, (), LIMITS, _warn)

    def _is_loud(self, call: Outgoing, now: float) -> bool:
        """Return whether to warn of a call that waits for long."""
        made_by: Any = call.made_by
        if isinstance(call.receiver, StreamReader):
            return False
        if made_by is not None:  # by a call that runs here, say
            session, number = made_by
            if session == BATCH or number in getattr(self._sessions.get(session), "calls", ()):
                return False
        key = call.connection.peer.name, call_name(call.receiver.target)
        if now - self._warned.get(key, -QUIET) < QUIET:
            return False
        if len(self._warned) >= _MAX_NAMES:
            self._warned.clear()
        self._warned[key] = now
        return True


def _warn(nodes: Sequence[CallNode]) -> None:
    if found := [each for each in standings_of(nodes) if each.state != IDLE]:
        log.warning("calls have waited for %.0f s:\n%s", LONG, Standings(found))
