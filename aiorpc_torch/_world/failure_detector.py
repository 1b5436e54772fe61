"""The failure detector: it finds lost peers, and ends what waits for them.

The connections of a killed peer end: it is pinged at once, and torch's send fails. The connections
of a frozen or unreachable peer do not end: it is pinged after some seconds of silence. Pings go to
a thread of torch's, and to the event loop on each open connection. A peer is lost if neither
answers, so one with a blocked loop is not lost. `HeartbeatTracker` decides when.
"""

import asyncio
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from .._aio.loops import call_soon, run_on_loop
from .._client.answers import error_of_close
from .._client.pool import ConnectionPool
from .._protocol import endpoints
from .._server.server import Server
from .._torch.agent import PeerInfo
from .._torch.compat import RawFuture
from .._torch.transport import classify_error, send, when_done
from ..errors import NotServing, RpcError, WorkerLost
from .heartbeat import HeartbeatTracker

log = logging.getLogger("aiorpc_torch")

PROBED_LOAD = 1 << 30  # load of a peer whose connection has ended: any other is preferred


class FailureDetector:
    """A watch over one worker's peers, on the loop that created it, until `close`."""

    def __init__(
        self, name: str, server: Server, members: Sequence[PeerInfo], heartbeat: float
    ) -> None:
        self.lost_peers: dict[str, RpcError] = {}
        self.on_loss: Callable[[RpcError], None] | None = None
        self.on_change: Callable[[], None] = _ignore
        """Called when a peer is lost, or is alive again."""
        self.is_exiting: Callable[[str], bool] = _is_not_exiting
        """Returns whether the process of a peer is known to end now, or to have ended. In any
        thread."""
        self.exit_reason: Callable[[str], Awaitable[str]] = _no_reason
        """Waits for the end of that process; returns how it has ended, "" if that is unknown."""
        self.has_left: Callable[[str], Awaitable[bool]] = _has_not_left
        self._name = name
        self.only_linked = False  # silence counts on open connections only
        self._pool: ConnectionPool  # from `start` on
        self._server = server
        self._peers = {each.name: each.info for each in members if each.name != name}
        self._heartbeat = heartbeat
        self._tracker = HeartbeatTracker(heartbeat, server.last_heard)
        self.last_heard = server.last_heard
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._given_up: dict[str, RpcError] = {}  # peers that will not rejoin
        self._rejoined: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._probed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered: set[tuple[str, int]] = set()  # processes with a ping by torch on its way

    def start(self, pool: ConnectionPool) -> None:
        """Start watching. When a peer is lost, the calls to it in `pool` fail."""
        self._pool, server = pool, self._server
        self._timer = self._loop.call_later(self._tracker.interval, self._check)
        server.lost_peers, server.on_message = self.lost_peers, self.on_message
        server.on_disconnect = self.on_disconnect
        server.peers.on_failure = self._on_peer_failed
        for caller in server.sessions.callers():  # before this worker's start was over
            self.on_message(caller)

    def close(self) -> None:
        """Stop watching."""
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    async def wait_until_alive(self, peer: str) -> None:
        """Wait until a lost peer has rejoined; return at once if it is not lost.

        Raises:
            WorkerLost: if it will not rejoin.
        """
        if asyncio.get_running_loop() is not self._loop:  # of another thread
            waiting = asyncio.run_coroutine_threadsafe(self.wait_until_alive(peer), self._loop)
            return await asyncio.wrap_future(waiting)
        if peer in self._probed:  # a probe may be under way
            await self._probed[peer].wait()
        if peer in self.lost_peers:
            await self._rejoined[peer].wait()
        if (error := self._given_up.get(peer)) is not None:
            raise error

    def penalty(self, peer: str) -> int | None:
        """Return 0 for a live peer, None for a lost one, and much while a probe is under way."""
        if peer in self.lost_peers or peer in self._server.peers.leave_messages:
            return None
        probe = self._probed.get(peer)
        return 0 if probe is None or probe.is_set() else PROBED_LOAD

    def replace(self, member: PeerInfo) -> None:
        """Watch the replacement process of a peer from now on."""
        self._peers[member.name] = member.info
        self.on_message(member.name)
        self._mark_alive(member.name)

    def give_up(self, peer: str, error: RpcError) -> None:
        """Note that a peer will not rejoin."""
        self._given_up[peer] = error
        self.lost_peers.setdefault(peer, error)
        self._rejoined[peer].set()
        self.on_change()

    def linked(self) -> set[str]:
        """Return the peers with an open connection, in either direction."""
        return self._pool.linked() | self._server.sessions.linked()

    def probe(self, peer: str) -> None:
        """Ping a peer; if the ping fails, the peer is lost."""
        self._probe(peer, self._peers[peer].id)

    # ── signs of life ───────────────────────────────────────────────────────────────────────────

    def on_message(self, peer: str) -> None:
        """Record a message from a peer. Thread-safe."""
        self._tracker.record(peer, time.monotonic())
        if peer in self.lost_peers:  # it was frozen, or unreachable
            call_soon(self._loop, self._mark_alive, peer)

    def _mark_alive(self, peer: str) -> None:
        self._probed[peer].set()
        if self.lost_peers.pop(peer, None) is not None:
            log.info("%s: worker %r is back", self._name, peer)
            self._rejoined.pop(peer, asyncio.Event()).set()
        self.on_change()

    def on_disconnect(self, peer: str, number: int, error: RpcError) -> RpcError | None:
        """Probe a peer whose connection ended without a leave message. Thread-safe.

        A peer that has told of its failure is lost already: return that error. A child of this
        process that is dead or dies is lost once its exit code is known: return None.
        """
        is_current = peer in self._peers and self._peers[peer].id == number
        if is_current and (told := self.told_failure(peer)) is not None:
            return told
        if is_current and self._open and self.is_exiting(peer):
            run_on_loop(self._loop, self._await_exit, peer, number, error)
            return None
        run_on_loop(self._loop, self._probe, peer, number)  # before its callers resume
        return error

    def _is_watched(self, peer: str, number: int) -> bool:
        """Return whether this is the number of a peer's current process."""
        return self._open and peer in self._peers and self._peers[peer].id == number

    def _await_exit(self, peer: str, number: int, error: RpcError) -> None:
        """Lose a peer when its exit code is known; with `error` if it stays unknown."""
        if self._is_watched(peer, number):
            self._probed[peer].clear()
            self._start(self._lose_exited(peer, number, error))

    async def _lose_exited(self, peer: str, number: int, error: RpcError) -> None:
        reason = await self.exit_reason(peer)
        if self._is_watched(peer, number):
            found = WorkerLost(peer, reason) if reason else error
            self.lose(peer, self.told_failure(peer) or found)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def told_failure(self, peer: str) -> RpcError | None:
        """Return the failure that a lost peer has reported itself, if it has."""
        return self.lost_peers.get(peer) if self._server.peers.leave_messages.get(peer) else None

    def on_leave_message(self, peer: str, number: int, what: str, text: str) -> None:
        """Note why a peer closed a connection. Thread-safe."""
        call_soon(self._loop, self._server.peers.on_leave_message, peer, number, what, text)

    # ── pings ───────────────────────────────────────────────────────────────────────────────────

    def _probe(self, peer: str, number: int) -> None:
        if self._is_watched(peer, number):
            self._probed[peer].clear()
            self._ping(peer)

    def _check(self) -> None:
        waited_for = self._pool.awaited_peers() | self._server.sessions.callers()
        if self.only_linked:
            waited_for &= self.linked()
        silent, lost = self._tracker.check(time.monotonic(), waited_for & self._peers.keys())
        for peer in silent:
            self._ping(peer)
        for peer in lost:
            silence = f"no sign of life for {self._heartbeat:g} s"
            self.lose(peer, WorkerLost(peer, silence))
        self._timer = self._loop.call_later(self._tracker.interval, self._check)

    def _ping(self, peer: str) -> None:
        if not self._open:
            return
        info = self._peers[peer]
        self._pool.ping(peer)
        self._server.sessions.ping(peer)
        if (peer, info.id) in self._unanswered:
            return
        try:
            answer = send(info, endpoints.ping, b"")
        except Exception as exc:
            self._on_unreachable(peer, exc)
        else:
            self._unanswered.add((peer, info.id))
            when_done(answer, functools.partial(self._on_answer, peer, info.id))

    def _on_answer(self, peer: str, number: int, answer: "RawFuture[Any]") -> None:
        self._unanswered.discard((peer, number))
        if self._peers[peer].id != number:
            return  # the answer of a process that was replaced
        try:
            answer.wait()
        except BaseException as exc:  # the peer chooses the class
            self._on_unreachable(peer, exc)
        else:
            self._probed[peer].set()
            self.on_message(peer)

    def _on_unreachable(self, peer: str, exc: BaseException) -> None:
        if not self._open:  # the supervisor ends the children
            return
        error = classify_error(exc, peer)
        told = self.told_failure(peer)
        if told is None and isinstance(error, WorkerLost) and self.is_exiting(peer):
            self._await_exit(peer, self._peers[peer].id, error)
        else:
            self.lose(peer, told or error)

    # ── losses ──────────────────────────────────────────────────────────────────────────────────

    def _on_peer_failed(self, peer: str, failure: str) -> None:
        """Lose a peer that reports its own failure."""
        self.lose(peer, error_of_close(peer, "failed", failure))

    def lose(self, peer: str, error: RpcError) -> None:
        """Fail what waits for a peer: it is lost."""
        if not self._open or isinstance(error, NotServing):  # torch's RPC has ended here
            return
        log.info("%s: %s", self._name, error)
        self.lost_peers[peer] = error
        self._probed[peer].set()
        self._pool.on_peer_lost(peer, error)
        self._server.sessions.cancel_calls_of(peer)
        self.on_change()
        if self.on_loss is not None and peer not in self._server.peers.leave_messages:
            self._start(self._report_unless_left(peer, error))
        elif self.on_loss is not None and self._server.peers.leave_messages[peer]:
            self.on_loss(error)

    async def _report_unless_left(self, peer: str, error: RpcError) -> None:
        """Report the loss, unless the peer's block had ended in order before."""
        if not await self.has_left(peer) and self.on_loss is not None:
            self.on_loss(error)


def _is_not_exiting(_: str) -> bool:
    return False


async def _no_reason(_: str) -> str:
    return ""


def _ignore() -> None:
    """Ignore the change."""


async def _has_not_left(_: str) -> bool:
    return False
