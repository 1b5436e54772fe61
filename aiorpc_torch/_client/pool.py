"""The pool of connections: one for each event loop that calls and each peer."""

import asyncio
import contextlib
import functools
import itertools
import weakref
from asyncio import get_running_loop
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from .._aio.loops import call_soon
from .._endpoint import entry_points
from .._peers.observer import PeerObserver
from .._peers.peers import Peers, reason_of
from .._torch.compat import RRefBase, WorkerInfo
from .._torch.devices import NO_DEVICES, DeviceMapping, DeviceRoutes
from .._torch.rrefs import is_adopted, owner_name, past_ids, split_past_name
from .._torch.transport import is_own_end
from .._wire.ancestry import CallKey, call_of
from .._wire.connection_state import Phase
from .._wire.frames import CloseReason
from .._wire.targets import target_name
from ..errors import NotInWorld, RpcError, UnknownWorker, WorkerGone, WorkerLeft, WorkerLost
from .connection import Connection
from .introduction import Introductions
from .pending import InlineFuture, ReplyReceiver
from .stream_reader import StreamReader

# Quicker than the method of rpc.RRef, which torch wraps in Python. It is right while no process of
# this world is gone for good; `owner_name` tells such a one from a member that has its name.
_owner_name = RRefBase.owner_name

WorkerRef = str | int | WorkerInfo
"""A worker by name, by rank or as torch's `WorkerInfo`."""

_ByPeer = dict[str, list[Connection]]
"""The connections of one loop to each peer. The last one takes calls; others have pending ones."""

_LoopConnections = tuple[Callable[[], asyncio.AbstractEventLoop | None], _ByPeer]
"""A weak reference to a loop, and its connections."""

_RETIRING = Phase.RETIRING

MOST_OUTGOING = 1_000  # calls of one connection that are looked at


class Outgoing(NamedTuple):
    """A pending call of this process."""

    loop: asyncio.AbstractEventLoop
    connection: Connection
    number: int
    receiver: ReplyReceiver

    @property
    def future(self) -> Any:
        """Return the future that a task waits for, None if no task does."""
        if isinstance(self.receiver, StreamReader):
            return self.receiver.wakeup.waiter
        return self.receiver

    @property
    def made_by(self) -> CallKey | None:
        """Return the key of the call or batch here that has made it, None if that is unknown."""
        context = getattr(self.receiver, "_context", None)  # once a task waits
        return None if context is None else call_of(context)


class ConnectionPool:
    """The connections of this process to the peers of its world. It makes some from `open` on.

    Args:
        members: the workers of the world.
        introductions: open the connections.
        max_restarts: restarts of children in a world of one host, None for another world.

    Attributes:
        worker: name of this process's worker.
        observer: is told what the connections see of the peers.
        refusal: why no calls can be made, "" if they can.
        devices: for each peer those from which tensors may be sent, and to which.
    """

    def __init__(
        self,
        members: Peers,
        observer: PeerObserver,
        introductions: Introductions,
        max_restarts: int | None = None,
    ) -> None:
        self.worker = members.name
        self.refusal = entry_points.NO_WORLD
        self._members = members
        self.observer = observer
        self._introductions = introductions
        self._max_restarts = max_restarts
        self.devices: Mapping[str, DeviceMapping] = {}
        # Each loop has its own connections, so nothing here needs a lock. The keys are ids, since
        # other threads read the counters: a WeakKeyDictionary cannot be iterated meanwhile.
        self._by_loop: dict[int, _LoopConnections] = {}
        self._last: _LoopConnections = (lambda: None, {})  # of the loop that called last
        self._closers: dict[int, AsyncGenerator[None]] = {}  # close a loop's connections
        self._numbers = itertools.count()
        self._finished: Counter[str] = Counter()  # counters of finished connections
        self._watches: dict[object, tuple[Collection[str], Callable[[RpcError], None]]] = {}
        self._supervisors: dict[str, list[weakref.WeakMethod[Callable[[], None]]]] = {}

    def open(self) -> None:
        """Let calls be made: the members are known."""
        maps = self._members.device_maps()
        self.devices = DeviceRoutes.for_worker(self._members.name, maps).calls
        self.refusal = ""

    def find(self, worker: WorkerRef) -> str:
        """Return the name of a worker of this world.

        Raises:
            UnknownWorker: if there is no such worker; the message names the workers.
            WorkerGone: if it is the name that `owner_name` gives an owner whose process has ended.
        """
        key = worker.name if isinstance(worker, WorkerInfo) else worker
        try:
            return self._members.workers[key].name
        except (KeyError, TypeError):
            if isinstance(key, str) and split_past_name(key)[1] >= 0:
                raise self._no_member(key) from None
            names = ", ".join(self._members.names())
            text = f"no worker {worker!r} in this world; there are: {names}"
            raise UnknownWorker(text) from None

    # ── connections ─────────────────────────────────────────────────────────────────────────────

    def connection(self, worker: str) -> Connection:
        """Return the connection of the running loop to `worker`, a new one if there is none."""
        loop = get_running_loop()
        last, by_peer = self._last
        if last() is not loop:
            by_peer = self._switch_to(loop)
        known = by_peer.get(worker)
        if known and (connection := known[-1]).phase < _RETIRING:
            return connection
        return self._connect(by_peer, worker)

    def _connect(self, by_peer: _ByPeer, worker: str) -> Connection:
        if (peer := self._members.workers.get(worker)) is None:
            raise self._no_member(worker)
        if self._introductions.holding is None and peer.has_left:
            raise WorkerLeft(worker, may_have_run=False)
        for each in _all(by_peer):
            if each.is_over:
                by_peer[each.peer.name].remove(each)
                self._finished.update(each.counters())
        connection = Connection(
            self._members.me,
            peer,
            next(self._numbers),
            self.observer,
            self._introductions,
            self._successor,
            self.devices.get(worker, NO_DEVICES),
        )
        connection.open()
        by_peer.setdefault(worker, []).append(connection)
        return connection

    def _no_member(self, owner: str) -> WorkerGone:
        """Return the error of a call to an owner of RRefs that is no member."""
        name, worker_id = split_past_name(owner)
        if self._members.worker_id_of(name) in (None, worker_id):
            return WorkerLeft(name, "create() the object of this RRef again", may_have_run=False)
        reason = "it was restarted, and this RRef belongs to its old process. create() it again"
        return WorkerLost(name, reason, may_have_run=False)

    def _successor(self, worker: str) -> Connection:
        """Return the connection that takes calls which were not sent over an earlier one.

        Raises:
            RpcError: if no calls can be made, or the worker is gone.
        """
        if self.refusal:
            raise NotInWorld(self.refusal)
        return self.connection(worker)

    def _is_gone(self, owner: str) -> bool:
        """Return whether an owner of RRefs is no member: another process may have its name."""
        return owner not in self._members.workers

    def _switch_to(self, loop: asyncio.AbstractEventLoop) -> _ByPeer:
        """Return the connections of the running loop, which is not the one that called last."""
        known = self._by_loop.get(id(loop))
        if known is None or known[0]() is not loop:
            self._forget_ended_loops()
            known = self._add_loop(loop)
        self._last = known
        return known[1]

    def _forget_ended_loops(self) -> None:
        """Forget loops that ended without closing their asynchronous generators."""
        for key, (find, by_peer) in [*self._by_loop.items()]:
            if (loop := find()) is None or loop.is_closed():
                for each in _all(by_peer):
                    each.on_loop_closed()
                self._forget_loop(key)

    def _add_loop(self, loop: asyncio.AbstractEventLoop) -> _LoopConnections:
        """Note the running loop, and see to it that its end closes its connections."""
        key = id(loop)
        known: _LoopConnections = weakref.ref(loop), {}
        self._by_loop[key] = known
        # The loop knows an asynchronous generator from its first step on. `asyncio.run` and its
        # like close it when the loop ends.
        closer = self._closers[key] = self._close_with_loop(key, known[1])
        with contextlib.suppress(StopIteration):
            closer.__anext__().send(None)
        return known

    async def _close_with_loop(self, key: int, by_peer: _ByPeer) -> AsyncGenerator[None]:
        """Close the running loop's connections when it ends, or when this worker leaves."""
        try:
            yield
        finally:
            connections = [each for each in _all(by_peer) if not each.is_over]
            for each in connections:
                each.leave("ended", "", NotInWorld("the event loop of this call has ended"))
            self._forget_loop(key)
            await asyncio.gather(*(each.ended.wait() for each in connections))

    def _forget_loop(self, key: int) -> None:
        self._last = (lambda: None, {})
        _, by_peer = self._by_loop.pop(key, (None, {}))
        self._closers.pop(key, None)
        for each in _all(by_peer):  # no task waits on a loop that has ended
            self._finished.update(each.counters() | {"in_flight": 0, "unsent": 0})

    def _loops(self) -> list[tuple[asyncio.AbstractEventLoop, _ByPeer]]:
        every = [*self._by_loop.values()]
        return [(loop, by_peer) for find, by_peer in every if (loop := find()) is not None]

    # ── counters ────────────────────────────────────────────────────────────────────────────────

    def counters(self) -> dict[str, int]:
        """Return the summed counters of the connections, by the names of `Stats`. Thread-safe."""
        total = Counter(self._finished)
        for _, each in self.connections():
            total.update(each.counters())
        return {**total}

    def outgoing(self, most: int | None = MOST_OUTGOING) -> "list[Outgoing]":
        """Return the oldest pending calls of each connection, None for all. In any thread."""
        return [
            Outgoing(loop, each, number, receiver)
            for loop, each in self.connections()
            for number, receiver in each.oldest(most)
        ]

    def waits(self, most: int) -> dict[str, tuple[int, list[tuple[str, float]]]]:
        """Return for each peer the number of pending calls, and the oldest but streams.

        In any thread. `most` is the number of those that are looked at on each connection.
        """
        found: dict[str, tuple[int, list[tuple[str, float]]]] = {}
        for _, each in self.connections():
            if each.waiting:
                count, oldest = found.get(each.peer.name, (0, []))
                calls = [call for _, call in each.oldest(most) if type(call) is InlineFuture]
                oldest += [(target_name(call.target), call.started) for call in calls]
                found[each.peer.name] = count + each.waiting, oldest
        return found

    def connected(self) -> set[str]:
        """Return the peers to which the running loop has a connection."""
        running = asyncio.get_running_loop()
        return {e.peer.name for loop, e in self.connections() if loop is running and e.is_open}

    def linked(self) -> set[str]:
        """Return the peers to which any event loop has an open connection."""
        return {each.peer.name for _, each in self.connections() if each.is_open}

    def ping(self, peer: str) -> None:
        """Ask the event loop of `peer` for a sign of life, on each open connection."""
        for loop, each in self.connections():
            if each.peer.name == peer:
                call_soon(loop, each.ping)

    def check_paths(self, timeout: float) -> None:
        """End the connections whose path has carried nothing for `timeout` seconds."""
        for loop, each in self.connections():
            if each.is_open and not each.is_local:
                call_soon(loop, each.check_path, timeout)

    def connections(self) -> list[tuple[asyncio.AbstractEventLoop, Connection]]:
        """Return every connection with its event loop. In any thread."""
        return [(loop, each) for loop, by_peer in self._loops() for each in _all(by_peer)]

    def load(self, owner: str) -> int | None:
        """Return the unanswered calls of this process to an owner of RRefs, None if it is lost."""
        if self._is_gone(owner) or (penalty := self.observer.penalty(owner)) is None:
            return None
        found = (each for _, by_peer in self._loops() for each in [*by_peer.get(owner, [])])
        return penalty + sum(each.waiting for each in found)

    def worker_of(self, owner: str) -> str:
        """Return the name of the worker that owns an RRef, or did while its process lived."""
        return split_past_name(owner)[0] if self._is_gone(owner) else owner

    def gone(self, owner: str, if_left: str = "") -> WorkerGone:
        """Return the error of a call that no member of a group takes, as the one of `owner`."""
        worker = self.worker_of(owner)
        if self.has_left(worker):
            return WorkerLeft(worker, if_left, may_have_run=False)
        return WorkerLost(worker, "no member of the group is left", may_have_run=False)

    def is_replaced(self, rref: "RRefBase[Any]") -> bool:
        """Return whether the process that owned an RRef was replaced, or has left."""
        try:
            return self._is_gone(owner_name(rref))
        except RuntimeError:  # torch has stopped
            return False

    def is_never_replaced(self, worker: str) -> bool:
        """Return whether a worker is a child of a world that starts no child again."""
        return self._max_restarts == 0 and self._members.workers[worker].rank != 0

    def has_left(self, worker: str) -> bool:
        """Return whether a worker has told that it leaves in order."""
        known = self._members.workers.get(worker)
        return known is not None and known.has_left

    def is_lost(self, worker: str) -> bool:
        """Return whether a worker is lost."""
        known = self._members.peers.get(worker)
        return known is not None and known.is_lost

    # ── losses ──────────────────────────────────────────────────────────────────────────────────

    def awaited_peers(self) -> set[str]:
        """Return the peers that a call or a watch waits for."""
        called = {each.peer.name for _, each in self.connections() if each.waiting}
        return called.union(*(peers for peers, _ in [*self._watches.values()]))

    @contextlib.contextmanager
    def watching_peers(
        self, peers: Collection[str], on_loss: Callable[[RpcError], None]
    ) -> Iterator[None]:
        """Watch peers inside the block: `on_loss` is called on this loop if one is lost."""
        on_loop = functools.partial(call_soon, asyncio.get_running_loop(), on_loss)
        self._watches[key := object()] = peers, on_loop
        try:
            yield
        finally:
            del self._watches[key]

    def find_gone(self, peers: Collection[str]) -> RpcError | None:
        """Return why one of these peers is lost, else why one has left, None if all are there."""
        found = [(name, self._members.workers.get(name)) for name in sorted(peers)]
        for name, peer in found:
            if peer is not None and peer.is_lost and not peer.has_left:
                return WorkerLost(name, reason_of(peer.error)) if peer.error else WorkerLost(name)
        left = (name for name, peer in found if peer is None or peer.has_left)
        return next(map(WorkerLeft, left), None)

    def tell_of_losses(self, worker: str, on_loss: Callable[[], None]) -> None:
        """Call a method, in any thread, at each loss of a worker, while its object lives."""
        known = self._supervisors.setdefault(worker, [])
        known.append(weakref.WeakMethod(on_loss, known.remove))

    def on_peer_lost(self, peer: str, error: RpcError) -> None:
        """Fail all calls and watches that wait for `peer`, and tell who makes its objects again."""
        for peers, on_loss in [*self._watches.values()]:
            if peer in peers:
                on_loss(error)
        self._tell_supervisors(peer)
        for loop, by_peer in self._loops():
            for each in [*by_peer.get(peer, ())]:
                call_soon(loop, each.on_peer_lost, error)

    def end_process(self, worker: str, error: RpcError) -> None:
        """End the connections to a member's process, which was replaced or has left."""
        self._tell_supervisors(worker)
        for loop, by_peer in self._loops():
            call_soon(loop, self._forget, by_peer, worker, error)

    def _tell_supervisors(self, worker: str) -> None:
        for find in [*self._supervisors.get(worker, ())]:
            if (tell := find()) is not None:
                tell()

    def _forget(self, by_peer: _ByPeer, peer: str, error: RpcError) -> None:
        for each in by_peer.pop(peer, ()):
            each.on_peer_lost(error)
            each.leave("ended", "", error)
            self._finished.update(each.counters())

    async def close(self, what: CloseReason = "left", text: str = "") -> None:
        """Close all connections, since this process leaves its world: pending calls fail.

        The peers are told `what` has ended it, and its `text`.
        """
        for _, on_loss in [*self._watches.values()]:
            on_loss(NotInWorld(WORLD_ENDED))
        running = asyncio.get_running_loop()
        for loop, by_peer in self._loops():
            for each in _all(by_peer):
                error = NotInWorld(f"this worker left its world before {each.peer.name!r} answered")
                if loop is running:
                    each.leave(what, text, error)
                else:
                    call_soon(loop, each.leave, what, text, error)
        if (closer := self._closers.get(id(running))) is not None:
            await closer.aclose()


def _all(by_peer: _ByPeer) -> list[Connection]:
    """Return the connections of a loop. In any thread."""
    return [each for of_peer in [*by_peer.values()] for each in [*of_peer]]


WORLD_ENDED = "this worker has left its world"
AGENT_ENDED = "torch's RPC of this process has ended: attach again after rpc.init_rpc"


def find_current() -> ConnectionPool | None:
    """Return the pool of this process, None if it can make no calls."""
    node = entry_points.here
    return None if node is None or node.pool.refusal else node.pool


def current() -> ConnectionPool:
    """Return the pool of this process.

    Raises:
        NotInWorld: if this process is in no world.
    """
    if (pool := find_current()) is None:
        node = entry_points.here
        raise entry_points.not_in_world() if node is None else NotInWorld(node.pool.refusal)
    return pool


def connection_to(worker: "WorkerRef | RRefBase[Any]") -> Connection:
    """Return the connection of the running loop to a worker, or to the owner of an RRef.

    Raises:
        NotInWorld: if this process is in no world.
        UnknownWorker: if there is no such worker.
        WorkerGone: if the worker is known to be gone.
    """
    node = entry_points.here
    pool: ConnectionPool = current() if node is None or node.pool.refusal else node.pool
    if not isinstance(worker, RRefBase):
        return pool.connection(pool.find(worker))
    try:
        owner = owner_name(worker) if past_ids else _owner_name(worker)
    except RuntimeError as exc:
        if is_own_end(str(exc)):
            raise NotInWorld(AGENT_ENDED if is_adopted() else WORLD_ENDED) from None
        owner = owner_name(worker)  # its process has left torch's group
    loop, (last, by_peer) = get_running_loop(), pool._last  # as `connection`, of the usual case
    if last() is loop and (known := by_peer.get(owner)) and known[-1].phase < _RETIRING:
        return known[-1]
    return pool.connection(owner)
