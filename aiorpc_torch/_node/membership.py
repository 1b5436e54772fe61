"""The membership of a world: it hears what is reported of the peers, and does what follows.

`Peers` decides: it has the record of each peer and the rules. This driver has the loop, and sends
pings. The connections of a killed peer end: it is pinged at once, and torch's send fails. The
connections of a frozen or unreachable peer do not end: it is pinged after some seconds of silence.
Pings go to the event loop on each open connection, and to a thread of torch's, which answers
without the GIL. A peer is lost if neither answers, so one whose Python code blocks the loop, or
keeps the GIL, is not lost.

The path of each connection between hosts is looked at as well: one that carries nothing is ended,
and the peer is pinged. If it answers otherwise, the next call opens another connection.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from .._aio.loops import await_on, call_soon, run_on_loop
from .._client.answers import error_of_close
from .._endpoint import entry_points
from .._peers.changes import Change, ChangeLog, Entry
from .._peers.peers import (
    Duty,
    Effect,
    Event,
    Peer,
    Peers,
    State,
    reason_of,
    replaced_text,
)
from .._torch import rrefs
from .._torch.agent import Agent, PeerInfo
from .._torch.compat import RawFuture
from .._torch.pipes import end_once_silent, send_again_to
from .._torch.transport import (
    REACH_REMEDY,
    classify_error,
    ping,
    send,
    when_done,
    wrap_future,
)
from ..errors import NotInWorld, RpcError, WorkerLeft, WorkerLost

if TYPE_CHECKING:
    from .node import Node

log = logging.getLogger("aiorpc_torch")

# Seconds between pings of a process that leaves: it may serve others for long.
_SEE_OFF_DELAYS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *[10.0] * 60)
_SIGNS_OF_LIFE = {Event.ANSWER, Event.ENTRY, Event.ATTACH}
PATH_TIMEOUT = 0.75  # of the heartbeat: a peer whose every path has ended is lost by then
PROBED_LOAD = 1 << 30  # load of a peer whose connection has ended: any other is preferred


class Child(Protocol):
    """A peer that is a child process of this one."""

    def is_exiting(self) -> bool:
        """Return whether it has ended or ends now. In any thread."""

    async def wait_for_exit(self) -> None:
        """Wait for its end, for some seconds at most."""

    def exit_reason(self) -> str:
        """Return how it has ended, "" if that is unknown."""


Children = Mapping[str, Child]
"""The peers that are child processes, by name. Any thread may read it."""


class Membership:
    """The membership of one world, on the loop that created it, from `start` to `close`."""

    def __init__(
        self,
        peers: Peers,
        heartbeat: float,  # seconds of silence after which a peer is lost
        node: "Node",  # this worker, with its connections
        children: Children | None = None,
    ) -> None:
        self.log = ChangeLog()
        self.agent: Agent | None = None  # learns of processes that enter, or are forgotten
        self._peers = peers
        self._heartbeat = heartbeat
        self._node = node
        self._children = {} if children is None else children
        self._is_parent = children is not None
        self._on_loss: Callable[[RpcError], None] | None = None
        self._loop = asyncio.get_running_loop()
        self.is_open = True  # reports are heard: until `close`
        self._changed = asyncio.Event()  # set and replaced after each report
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut: set[Peer] = set()  # those to which paths have carried nothing

    def start(self) -> None:
        """Start watching: the members are known."""
        self._timer = self._loop.call_later(self._heartbeat / 8, self._check)

    def close(self) -> None:
        """Stop watching, and hear no more reports; waits for peers end."""
        self.is_open = False
        self.wake()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    # Not a task group: it would wrap the exception of the user's block in an ExceptionGroup, and
    # has to be left in the task that entered it: pytest leaves a fixture in another.
    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ── reports, in any thread ──────────────────────────────────────────────────────────────────

    def on_message(self, peer: Peer) -> None:
        if peer.state is State.LOST:  # it was frozen or unreachable
            call_soon(self._loop, self.report, peer, Event.MESSAGE)

    def on_proof(self, peer: Peer) -> None:
        """Note that a process whose connection has ended has proven itself at a new socket."""
        call_soon(self._loop, self._on_proof, peer)

    def _on_proof(self, peer: Peer) -> None:
        peer.has_old_ping = False  # the proof is newer than the end
        self._cut.add(peer)
        self.report(peer, Event.ANSWER)

    def on_disconnect(self, name: str, worker_id: int, error: RpcError) -> RpcError | None:
        """Probe a process whose connection ended without a leave message; see `PeerObserver`."""
        peer = self._peers.get(name, worker_id)
        if peer is None or name == self._peers.name:
            return error
        if (known := peer.failure or peer.final) is not None:
            return peer.error or known
        # If it was found to end before, it is reported again all the same: the loss that follows
        # may have failed the calls already, in its thread, and those of this connection wait.
        is_exiting = self.is_open and (peer.is_exiting or self._is_exiting(name))
        event = Event.EXIT if is_exiting else Event.CUT
        run_on_loop(self._loop, self.report, peer, event, error)  # before its callers resume
        return None if is_exiting else error

    def on_leave_message(self, name: str, worker_id: int, what: str, text: str) -> None:
        """Note why a process has closed a connection, before its callers resume."""
        run_on_loop(self._loop, self._on_leave_message, name, worker_id, what, text)

    def _on_leave_message(self, name: str, worker_id: int, what: str, text: str) -> None:
        peer = self._peers.get(name, worker_id)
        if what == "detached" and text.isdecimal():
            self.report(peer, Event.DETACH, epoch=int(text))
        elif what == "failed":
            self.report(peer, Event.FAILURE, error_of_close(name, "failed", text))
        elif what == "left" or (what == "retires" and not self._peers.is_attached):
            self.report(peer, Event.LEAVE)

    # ── reports, on the loop ────────────────────────────────────────────────────────────────────

    def report(
        self, peer: Peer | None, event: Event, error: RpcError | None = None, *, epoch: int = 0
    ) -> None:
        """Hear an event of a process, and do what follows."""
        if peer is None or not self.is_open:
            return
        if isinstance(error, NotInWorld) and event is not Event.REFUSE:
            return  # torch's RPC has ended here
        if event in _SIGNS_OF_LIFE:
            peer.last_heard = time.monotonic()
        was_alive = peer.state is State.ALIVE
        effects = self._peers.apply(peer, event, error, epoch)
        is_changed = (peer.state is State.ALIVE) != was_alive
        if is_changed and was_alive:
            rrefs.note_gone(peer.worker_id, peer.name)
        elif is_changed:
            rrefs.note_back(peer.worker_id)
        self._do(effects, is_changed=is_changed)

    def probe(self, name: str) -> None:
        """Ping a peer; if that fails, it is lost. Not one that may attach, and has told nothing."""
        peer = self._peers.peers.get(name)
        if peer is not None and (peer.has_answered or not self._peers.is_attached):
            self.report(peer, Event.CUT)

    def lose(self, name: str, error: RpcError) -> None:
        self.report(self._peers.peers.get(name), Event.LOSS, error)

    def abandon(self, name: str, error: RpcError) -> None:
        """Note that no process takes the place of a peer."""
        self.report(self._peers.peers.get(name), Event.ABANDON, error)

    def add(self, member: PeerInfo) -> bool:
        """Add a member, or the newer process of one, whose loss may be known; it enters later."""
        if self.log.is_closed:  # this worker leaves: torch may have stopped
            return False
        assert self.agent is not None
        if (known := self._peers.peers.get(member.name)) is None:
            self.agent.add_peer(member)
            self._peers.admit(member)
        else:
            self.agent.free_name(known.member)
            self.agent.add_peer(member)
            self._do(self._peers.replace(member))
            # A child that was killed as it registered is known late, and none follows it.
            if self._is_parent and known.final is not None and member.name not in self._children:
                self.abandon(member.name, known.final)
        return True

    def announce(self, name: str) -> None:
        """Note that a process has entered."""
        self.report(self._peers.peers.get(name), Event.ENTRY)

    # ── duties ──────────────────────────────────────────────────────────────────────────────────

    def _do(self, effects: Iterable[Effect], *, is_changed: bool = True) -> None:
        """Do the duties; if a peer is lost or alive again, look at the waits for all peers too."""
        try:
            for duty, peer, error, change in effects:
                match duty:
                    case Duty.TELL if change is not None:
                        self._tell(change)
                    case Duty.FAIL if error is not None:
                        self._node.pool.on_peer_lost(peer.name, error)
                        reason = reason_of(error)
                        self._node.server.sessions.cancel_calls_of(peer.name, reason)
                    case Duty.REPORT if error is not None:
                        self._report_loss(peer, error)
                    case Duty.PING:
                        self._ping(peer)
                    case Duty.AWAIT_EXIT if error is not None:
                        self._start(self._await_exit(peer, error))
                    case Duty.SEE_OFF if not self._peers.is_attached:
                        self._start(self._see_off(peer))
                    case Duty.END if error is not None:
                        self._end(peer, error)
                    case Duty.FORGET:
                        left = f"worker {peer.name!r} has left its world"
                        self._node.end_process(peer, WorkerLeft(peer.name), left)
                        if self.agent is not None:
                            self.agent.free_name(peer.member)
        finally:
            self.wake()
            if is_changed:
                self._node.departures.settle()

    def _tell(self, change: Change) -> None:
        if not self.log.is_closed:
            reason = f": {change.reason}" if change.reason else ""
            log.info("%s: worker %r: %s%s", self._peers.name, change.name, change.kind, reason)
            self.log.record(change)
            self._node.registry.on_change(change.name)

    def _end(self, peer: Peer, error: RpcError) -> None:
        rrefs.note_gone(peer.worker_id, peer.name)
        is_replaced = self._peers.peers.get(peer.name) is not peer
        text = replaced_text(peer.name) if is_replaced else str(error)
        self._node.end_process(peer, error, text)
        if is_replaced and (address := self._peers.address_elsewhere(peer)):
            own = self._peers.own.member.address
            others = [each.member.address for each in self._peers.peers.values()]
            if end_once_silent(address, own, self._heartbeat, others):
                self._start(_ping_once(peer))

    def report_losses(self, on_loss: Callable[[RpcError], None]) -> None:
        """Call `on_loss` for each peer that is lost, now or later."""
        self._on_loss = on_loss
        for peer in [*self._peers.peers.values()]:
            if peer.is_lost and not peer.has_left and peer.error is not None:
                self._report_loss(peer, peer.error)

    def _report_loss(self, peer: Peer, error: RpcError) -> None:
        if (on_loss := self._on_loss) is None:
            return

        async def report_unless_left() -> None:
            if not await self._node.departures.is_done(peer.name):  # its block ended in order
                on_loss(error)

        if peer.failure is not None:
            on_loss(error)
        else:
            self._start(report_unless_left())

    async def _await_exit(self, peer: Peer, error: RpcError) -> None:
        """Lose a child when its exit code is known; with `error` if it stays unknown."""
        child = self._children.get(peer.name)
        if child is not None:
            await child.wait_for_exit()
        if peer.is_exiting:  # else a loss that came meanwhile has failed the calls
            # Not the error itself: perhaps it is of one call, which was not sent.
            reason = (child is not None and child.exit_reason()) or reason_of(error)
            self.report(peer, Event.LOSS, WorkerLost(peer.name, reason))

    async def _see_off(self, peer: Peer) -> None:
        """Ping a process that leaves until torch reports its end.

        torch closes the sockets of a broken pipe only when a message fails. (2.15;
        tests/integration/test_membership_soak.py)
        """
        info = peer.member.info
        for delay in _SEE_OFF_DELAYS:
            await asyncio.sleep(delay)
            try:
                await wrap_future(ping(info))
            except Exception:
                return

    # ── pings ───────────────────────────────────────────────────────────────────────────────────

    def _check(self) -> None:
        # First, and the paths last: an exception of one part must not end the watch.
        self._timer = self._loop.call_later(self._heartbeat / 8, self._check)
        # What something waits for, or whose calls run here.
        pool, sessions = self._node.pool, self._node.server.sessions
        awaited = pool.awaited_peers() | sessions.callers()
        if self._peers.is_attached:  # silence counts on open connections only
            awaited &= self._node.linked()
        now = time.monotonic()
        if self._peers.end_answered_probes(now):
            self.wake()
        silent, lost = self._peers.check_silence(now, self._heartbeat, awaited)
        for peer in silent:
            self._ping(peer)
        for peer, seconds in lost:
            self.report(peer, Event.LOSS, self._silence_error(peer, seconds))
        self._send_again({peer for peer, _ in lost})
        pool.check_paths(PATH_TIMEOUT * self._heartbeat)
        sessions.check_paths(PATH_TIMEOUT * self._heartbeat)

    def _send_again(self, lost: set[Peer]) -> None:
        """Let TCP send again soon to peers that are lost now, and to those that are back.

        Perhaps a link is cut: then many are lost at once, and all descriptors are looked at once.
        """
        known = self._peers.peers
        self._cut = {each for each in self._cut | lost if known.get(each.name) is each}
        back = {each for each in self._cut if each.state is State.ALIVE}
        # With one port for each worker, the ports replace what carries nothing (`_port.relay`).
        direct = (each for each in lost | back if not each.member.endpoint)
        elsewhere = [*filter(None, map(self._peers.address_elsewhere, direct))]
        if not elsewhere or not send_again_to(elsewhere, self._peers.own.member.address):
            self._cut -= back

    def _silence_error(self, peer: Peer, seconds: float) -> WorkerLost:
        text = f"no sign of life for {seconds:.3g} s"
        if peer.last_heard < 0 and (address := self._peers.address_elsewhere(peer)):
            text = f"{text}, nor any before, at {address}. {REACH_REMEDY}"
        return WorkerLost(peer.name, text)

    def _ping(self, peer: Peer) -> None:
        self._node.pool.ping(peer.name)  # the event loops, on each connection
        self._node.server.sessions.ping(peer.name)
        if peer.is_pinged:
            return
        try:
            answer = ping(peer.member.info)
        except Exception as exc:
            self.on_unreachable(peer, exc)
        else:
            peer.is_pinged = True
            when_done(answer, functools.partial(self._on_answer, peer, time.monotonic()))

    def _on_answer(self, peer: Peer, sent: float, answer: "RawFuture[Any]") -> None:
        peer.is_pinged = False
        try:
            answer.wait()
        except BaseException as exc:  # the peer chooses the class
            # torch may tell long after a cut what failed in it. Silence is noticed all the same.
            if peer.is_probed or peer.last_heard <= sent:
                self.on_unreachable(peer, exc)
        else:
            self.report(peer, Event.ANSWER)

    def on_unreachable(self, peer: Peer, exc: BaseException) -> None:
        """Note that a ping has failed: the peer is lost; a child that ends is, with its reason."""
        if self.is_open:  # else the supervisor ends the children
            error = classify_error(exc, peer.name, self._peers.address_elsewhere(peer))
            is_exit = isinstance(error, WorkerLost) and self._is_exiting(peer.name)
            self.report(peer, Event.EXIT if is_exit else Event.LOSS, error)

    def tell_to_exit(self, peer: Peer) -> None:
        """Let a peer end its process, also if its event loop is blocked; it is lost then."""
        try:
            answer = send(peer.member.info, entry_points.exit_process, b"")
        except Exception as exc:
            self.on_unreachable(peer, exc)
        else:
            when_done(answer, functools.partial(self._on_answer, peer, math.inf))

    def _is_exiting(self, name: str) -> bool:
        child = self._children.get(name)
        return child is not None and child.is_exiting()

    # ── questions ───────────────────────────────────────────────────────────────────────────────

    def penalty(self, name: str) -> int | None:
        """Return 0 for a live peer, None for a lost one, and much while it is probed."""
        peer = self._peers.peers.get(name)
        if peer is None:
            return 0  # this worker
        if peer.state is not State.ALIVE:
            return None
        return PROBED_LOAD if peer.is_probed else 0

    def is_lost(self, name: str) -> bool:
        """Return whether a peer is lost, and may answer again."""
        peer = self._peers.peers.get(name)
        return peer is not None and peer.state is State.LOST

    def failure_of(self, name: str) -> RpcError | None:
        """Return the failure that a peer has told of, if it has."""
        peer = self._peers.peers.get(name)
        return None if peer is None else peer.failure

    async def _until(self, is_so: Callable[[], object]) -> bool:
        """Wait until something is so; return False if this worker leaves before. On any loop."""

        async def wait() -> bool:
            while self.is_open:
                if is_so():
                    return True
                await self._changed.wait()
            return False

        return await await_on(self._loop, wait())

    async def wait_until_probed(self, name: str) -> None:
        """Wait for the ping that is under way, if one is. On any loop."""
        await self._until(lambda: not ((peer := self._peers.peers.get(name)) and peer.is_probed))

    async def wait_until_alive(self, name: str, former: int = -1) -> None:
        """Wait until a peer is not lost; see `PeerObserver`. Process `former` counts as lost."""

        def is_alive() -> bool:
            peer = self._peers.workers.get(name)
            if peer is None:
                raise WorkerLost(name, "it is lost for so long that its name is forgotten")
            if peer.has_left:
                raise WorkerLeft(name)
            if peer.final is not None:
                raise peer.final
            return peer.state is State.ALIVE and not peer.is_probed and peer.worker_id != former

        if not await self._until(is_alive):
            raise NotInWorld(f"this worker has left its world; it waited for worker {name!r}")

    async def wait_for_change(self) -> bool:
        """Wait for the next report of any peer; return False if this worker leaves. On its loop."""
        if self.is_open:
            await self._changed.wait()
        return self.is_open

    # ── changes ─────────────────────────────────────────────────────────────────────────────────

    def wake(self) -> None:
        """Let whoever waits for a change look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def next_change(self, entry: Entry) -> Entry | None:
        """Wait for the entry after that one; None if this worker leaves before. On any loop."""
        if entry.next is None and not self.log.is_closed:
            await self._until(lambda: entry.next is not None or self.log.is_closed)
        return entry.next


async def _ping_once(peer: Peer) -> None:
    """Send a message that fails: torch closes the sockets of a broken pipe only then. (2.15)"""
    with contextlib.suppress(Exception):
        await wrap_future(ping(peer.member.info))
