"""The failure detector: it finds lost peers, and ends what waits for them.

The connections of a killed peer end: it is pinged at once, and torch's send fails. The connections
of a frozen or unreachable peer do not end: it is pinged after some seconds of silence. Pings go to
the event loop on each open connection, and to a thread of torch's, which answers without the GIL.
A peer is lost if neither answers, so one whose Python code blocks the loop, or keeps the GIL, is
not lost. `HeartbeatTracker` decides when.
"""

import asyncio
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from .._aio.loops import await_on, call_soon, run_on_loop
from .._client.answers import error_of_close
from .._protocol.members import Members, reason_of
from .._torch.compat import RawFuture, WorkerInfo
from .._torch.transport import classify_error, ping, when_done, wrap_future
from ..errors import NotInWorld, RpcError, WorkerLeft, WorkerLost
from .heartbeat import HeartbeatTracker

if TYPE_CHECKING:
    from .node import Node

log = logging.getLogger("aiorpc_torch")

# Seconds between pings of a process that leaves: it may serve others for long.
_SEE_OFF_DELAYS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *[10.0] * 60)
PROBED_LOAD = 1 << 30  # load of a peer whose connection has ended: any other is preferred


class Children(Protocol):
    """The peers that are child processes of this one."""

    def is_exiting(self, name: str) -> bool:
        """Return whether a child has ended or ends now, False for another peer. In any thread."""

    async def exit_reason(self, name: str) -> str:
        """Wait for the end of that child; return how it has ended, "" if that is unknown."""


class FailureDetector:
    """A watch over one worker's peers, on the loop that created it, from `start` to `close`.

    Args:
        members: the workers of the world.
        heartbeat: seconds of silence after which a peer is lost.
        node: this worker, with its connections.
        children: tell how peers have ended that are child processes.
        only_linked: whether silence counts on open connections only.
    """

    def __init__(
        self,
        members: Members,
        heartbeat: float,
        node: "Node",
        children: Children | None = None,
        *,
        only_linked: bool = False,
    ) -> None:
        self.lost_peers, self.last_heard = members.lost_peers, members.last_heard
        self._members = members
        self._heartbeat = heartbeat
        self._node = node
        self._children = children
        self._only_linked = only_linked
        self._tracker = HeartbeatTracker(heartbeat, members.last_heard)
        self._loop = asyncio.get_running_loop()
        self._open = True
        self.on_loss: Callable[[RpcError], None] | None = None
        """Called for each peer that is lost."""
        self._given_up: dict[str, RpcError] = {}  # peers that will not rejoin
        self._rejoined: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._probed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered: set[tuple[str, int]] = set()  # processes with a ping by torch on its way

    def start(self) -> None:
        """Start watching: the members are known."""
        self._timer = self._loop.call_later(self._tracker.interval, self._check)

    def close(self) -> None:
        """Stop watching: `wait_until_alive` raises NotInWorld."""
        self._open = False
        for event in [*self._rejoined.values(), *self._probed.values()]:
            event.set()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    async def wait_until_alive(self, peer: str) -> None:
        """Wait until a lost peer has rejoined; return at once if it is not lost.

        Raises:
            WorkerLost: if it will not rejoin.
            WorkerLeft: if it has left in order.
            NotInWorld: once this worker leaves its world.
        """
        await await_on(self._loop, self._wait_until_alive(peer))

    async def wait_until_probed(self, peer: str) -> None:
        """Wait for the ping that is under way, if one is."""
        await await_on(self._loop, self._wait_until_probed(peer))

    async def _wait_until_probed(self, peer: str) -> None:
        if peer in self._probed:
            await self._probed[peer].wait()

    async def _wait_until_alive(self, peer: str) -> None:
        await self._wait_until_probed(peer)
        if peer in self.lost_peers and not self._has_left(peer) and self._open:
            await self._rejoined[peer].wait()
        if not self._open:
            raise NotInWorld(f"this worker has left its world; it waited for worker {peer!r}")
        if self._has_left(peer):
            raise WorkerLeft(peer)
        if peer not in self._members.processes:
            raise WorkerLost(peer, "it is lost for so long that its name is forgotten")
        if (error := self._given_up.get(peer)) is not None:
            raise error

    def _has_left(self, peer: str) -> bool:
        return self._members.leave_messages.get(peer) == ""

    def penalty(self, peer: str) -> int | None:
        """Return 0 for a live peer, None for a lost one, and much while a probe is under way."""
        if peer in self.lost_peers or peer in self._members.leave_messages:
            return None
        probe = self._probed.get(peer)
        return 0 if probe is None or probe.is_set() else PROBED_LOAD

    def on_replaced(self, peer: str) -> None:
        """Watch the replacement process of a peer from now on."""
        self._given_up.pop(peer, None)
        self.on_message(peer)
        self._mark_alive(peer)

    def give_up(self, peer: str, error: RpcError) -> None:
        """Note that a peer will not rejoin."""
        self._given_up[peer] = error
        self.lost_peers.setdefault(peer, error)
        self._rejoined[peer].set()
        self._node.departures.settle()

    def forget(self, peer: str) -> None:
        """Forget a peer that is gone; what waits for its return ends."""
        self._given_up.pop(peer, None)
        for events in (self._rejoined, self._probed):
            events.pop(peer, asyncio.Event()).set()

    def probe(self, peer: str) -> None:
        """Ping a peer; if the ping fails, the peer is lost."""
        self._probe(peer, self._members.processes.get(peer, -1))

    # ── signs of life ───────────────────────────────────────────────────────────────────────────

    def on_message(self, peer: str) -> None:
        """Record a message from a peer. Thread-safe."""
        self._tracker.record(peer, time.monotonic())
        # It was frozen or unreachable. The last frame of a process that fails is no sign of life.
        if peer in self.lost_peers and peer not in self._members.leave_messages:
            call_soon(self._loop, self._mark_alive, peer)

    def _mark_alive(self, peer: str) -> None:
        self._probed[peer].set()
        if self.lost_peers.pop(peer, None) is not None:
            log.info("%s: worker %r is back", self._members.name, peer)
            self._rejoined.pop(peer, asyncio.Event()).set()
            self._node.note("returned", peer)
        self._node.departures.settle()

    def on_disconnect(self, peer: str, process: int, error: RpcError) -> RpcError | None:
        """Probe a peer whose connection ended without a leave message. Thread-safe.

        A peer that has told of its failure is lost already: return that error. A child of this
        process that is dead or dies is lost once its exit code is known: return None.
        """
        is_current = self._is_current(peer, process)
        if is_current and (told := self.told_failure(peer)) is not None:
            return told
        if is_current and self._open and self._is_exiting(peer):
            run_on_loop(self._loop, self._await_exit, peer, process, error)
            return None
        run_on_loop(self._loop, self._probe, peer, process)  # before its callers resume
        return error

    def _is_watched(self, peer: str, process: int) -> bool:
        """Return whether this is the current process of a peer, until `close`."""
        return self._open and self._is_current(peer, process)

    def _is_exiting(self, peer: str) -> bool:
        return self._children is not None and self._children.is_exiting(peer)

    def _await_exit(self, peer: str, process: int, error: RpcError) -> None:
        """Lose a peer when its exit code is known; with `error` if it stays unknown."""
        if self._is_watched(peer, process):
            self._probed[peer].clear()
            self._start(self._lose_exited(peer, process, error))

    async def _lose_exited(self, peer: str, process: int, error: RpcError) -> None:
        reason = "" if self._children is None else await self._children.exit_reason(peer)
        if self._is_watched(peer, process):
            if isinstance(error, WorkerLost):  # perhaps of one call, which was not sent
                error = WorkerLost(peer, error.reason)
            found = WorkerLost(peer, reason) if reason else error
            self.lose(peer, self.told_failure(peer) or found)

    # Not a task group: it would wrap the exception of the user's block in an ExceptionGroup, and
    # has to be left in the task that entered it: pytest leaves a fixture in another.
    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def told_failure(self, peer: str) -> RpcError | None:
        """Return the failure that a lost peer has reported itself, if it has."""
        return self.lost_peers.get(peer) if self._members.leave_messages.get(peer) else None

    def on_leave_message(self, peer: str, process: int, what: str, text: str) -> None:
        """Record why a peer has closed a connection, before its callers resume. Thread-safe."""
        run_on_loop(self._loop, self._record_leave_message, peer, process, what, text)

    def _record_leave_message(self, peer: str, process: int, what: str, text: str) -> None:
        if what == "detached":
            self._node.on_detached(peer, text)
        if what == "retires" and self._node.attachments is None:
            what = "left"
        if not self._members.is_current(peer, process) or what not in ("left", "failed"):
            return
        messages = self._members.leave_messages
        is_first = peer not in messages
        messages[peer] = text if what == "failed" else ""
        if is_first and what == "failed":
            self.lose(peer, error_of_close(peer, "failed", text))
        elif is_first:
            self._node.note("left", peer)
            self._rejoined.pop(peer, asyncio.Event()).set()  # what waits for its return ends
            if self._open:
                self._start(self._see_off(self._members.peers[peer].info))
        self._node.departures.settle()

    async def _see_off(self, info: WorkerInfo) -> None:
        """Ping a process that leaves until torch reports its end.

        torch closes the sockets of a broken pipe only when a message fails. (2.15;
        tests/integration/test_membership_soak.py)
        """
        for delay in _SEE_OFF_DELAYS:
            await asyncio.sleep(delay)
            try:
                await wrap_future(ping(info))
            except Exception:
                return

    # ── pings ───────────────────────────────────────────────────────────────────────────────────

    def _is_current(self, peer: str, process: int) -> bool:
        """Return whether a peer, which is not this worker, has that process."""
        return peer != self._members.name and self._members.is_current(peer, process)

    def _probe(self, peer: str, process: int) -> None:
        if self._is_watched(peer, process):
            self._probed[peer].clear()
            self._ping(peer)

    def _check(self) -> None:
        awaited = self._node.awaited() & self._members.peers.keys()
        if self._only_linked:
            awaited &= self._node.linked()
        # A peer whose connection has ended is linked to nothing, and may be frozen.
        awaited |= {peer for peer, probe in self._probed.items() if not probe.is_set()}
        silent, lost = self._tracker.check(time.monotonic(), awaited)
        for peer in silent:
            self._ping(peer)
        for peer in lost:
            silence = f"no sign of life for {self._heartbeat:g} s"
            self.lose(peer, WorkerLost(peer, silence))
        self._timer = self._loop.call_later(self._tracker.interval, self._check)

    def _ping(self, peer: str) -> None:
        if not self._open:
            return
        info = self._members.peers[peer].info
        self._node.ping(peer)
        if (peer, info.id) in self._unanswered:
            return
        try:
            answer = ping(info)
        except Exception as exc:
            self._on_unreachable(peer, exc)
        else:
            self._unanswered.add((peer, info.id))
            when_done(answer, functools.partial(self._on_answer, peer, info.id))

    def _on_answer(self, peer: str, process: int, answer: "RawFuture[Any]") -> None:
        self._unanswered.discard((peer, process))
        if not self._members.is_current(peer, process):
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
        if told is None and isinstance(error, WorkerLost) and self._is_exiting(peer):
            self._await_exit(peer, self._members.processes[peer], error)
        else:
            self.lose(peer, told or error)

    # ── losses ──────────────────────────────────────────────────────────────────────────────────

    def lose(self, peer: str, error: RpcError) -> None:
        """Fail what waits for a peer: it is lost."""
        if not self._open or isinstance(error, NotInWorld):  # torch's RPC has ended here
            return
        log.info("%s: %s", self._members.name, error)
        self.lost_peers[peer] = error
        self._node.note("lost", peer, reason_of(error))
        self._probed[peer].set()
        self._node.fail(peer, error)
        self._node.departures.settle()
        message = self._members.leave_messages.get(peer)
        if self.on_loss is not None and message is None:
            self._start(self._report_unless_left(self.on_loss, peer, error))
        elif self.on_loss is not None and message:
            self.on_loss(error)

    async def _report_unless_left(
        self, on_loss: Callable[[RpcError], None], peer: str, error: RpcError
    ) -> None:
        """Report the loss, unless the peer's block had ended in order before."""
        if not await self._node.departures.has_left_in_order(peer):
            on_loss(error)
