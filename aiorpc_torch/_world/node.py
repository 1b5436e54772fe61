"""A node: everything that this process has as a worker of its world."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.futures import Future

from .._aio.loops import await_on
from .._client.introduction import Introductions
from .._client.pool import ConnectionPool
from .._port.port import Port
from .._protocol.endpoints import completed_future
from .._protocol.members import Members, left_text, reason_of, replaced_text
from .._server.exports import ExportPolicy
from .._server.server import Server
from .._torch import rrefs
from .._torch.agent import Agent, PeerInfo, adopted_peer, device_map_for
from .._torch.compat import WorkerInfo
from .._torch.devices import DeviceRoutes
from .._wire.plain import reader
from ..errors import RpcError, WorkerLeft, WorkerLost
from .attachments import LEFT_GROUP, Attachments
from .changes import Change, ChangeLog, Entry, Kind
from .config import NodeConfig
from .departures import Departures
from .failure_detector import Children, FailureDetector
from .registry import Registry

_read_leave_message = reader(tuple[str, int, str])


def host_for(peers: Iterable[PeerInfo], me: PeerInfo) -> str | None:
    """Return the address for peers in other network namespaces, None if there are none."""
    if me.namespace and {each.namespace for each in peers} == {me.namespace}:
        return None
    return urlsplit(me.address).hostname


KEPT_GONE = 256  # members that came later and are gone, whose names are still known


class Node:
    """Everything that this process has as a worker of its world.

    `worker` and `attach` make it the current node of the process, then start it. Until then it
    holds what peers send by torch RPC.

    Args:
        members: the workers of the world; `worker` learns them once torch's RPC has started.
        config: the options of this worker.
        children: as for `FailureDetector`.
        introductions: open the connections to peers (default: by torch RPC).
        is_attached: whether `init_rpc` has started the world. There is no coordinator then.
    """

    def __init__(
        self,
        members: Members,
        config: NodeConfig,
        children: Children | None = None,
        introductions: Introductions | None = None,
        *,
        is_attached: bool = False,
    ) -> None:
        self.members = members
        self.attachments: Attachments | None = None
        if is_attached:
            self.attachments = Attachments(
                members, config.start_timeout, self._on_attached, self._on_detached
            )
        self.detector = FailureDetector(
            members, config.heartbeat, self, children, only_linked=is_attached
        )
        exports = None if config.exports is None else ExportPolicy(config.exports, members.name)
        self.server = Server(members, self.detector, config.threads, exports)
        introductions = introductions or Introductions(members, self.attachments)
        self.pool = ConnectionPool(members, self.detector, introductions, config.max_restarts)
        self.departures = Departures(
            members, self.pool, self.linked, self._told, self._probe, not is_attached
        )
        self.leaves_alone = False
        """Whether this worker's exit does not wait for its peers, which go on."""
        self._first: set[str] = set()  # members that were there when this worker started
        self._gone: deque[PeerInfo] = deque()  # later members that have left or are lost
        self._changes = ChangeLog()
        if not is_attached:
            self._changes.admit(members.peers)
        self.registry = Registry(
            members, self.server.names, self._changes.has, self.detector.wait_until_alive
        )
        self._changed = asyncio.Event()  # set and replaced at each change
        self.loop = asyncio.get_running_loop()
        self._agent: Agent | None = None
        self._held: list[Callable[[], None]] | None = []  # until `start`

    def start(
        self,
        host: str | None,
        workers: Iterable[PeerInfo] = (),
        agent: Agent | None = None,
        port: Port | None = None,
    ) -> None:
        """Call, watch and serve the peers: all members are known.

        Args:
            host: address for peers in other network namespaces, None if there are none.
            workers: the members, unless they were known before.
            agent: learns of replacement processes.
            port: takes the place of a port of `host`.
        """
        for worker in workers:
            self._admit(worker)
            self._first.add(worker.name)
        if self.attachments is not None:
            self.use_device_maps()
        self._agent = agent
        self.pool.open()
        self.detector.start()
        try:
            self.server.open(host, port)
        finally:
            held, self._held = self._held or [], None
            for step in held:
                step()

    # ── messages of peers, on threads of torch ──────────────────────────────────────────────────

    def leave_message(self, data: bytes) -> "Future[Any]":
        """Record that a peer has failed, or with an empty text that it leaves in order."""
        name, process, failure = _read_leave_message(data)
        what = "failed" if failure else "left"
        self._when_started(lambda: self.detector.on_leave_message(name, process, what, failure))
        return completed_future(None)

    def introduce(self, data: bytes) -> "Future[Any]":
        """Answer a request for an introduction."""
        return self._answer(self.server.introduce, data)

    def departure(self, data: bytes) -> "Future[Any]":
        """Answer a worker that reports what it does."""
        return self._answer(self.departures.handle, data)

    def attach_message(self, data: bytes) -> "Future[Any] | None":
        """Answer a worker that attaches or leaves; return None if this one is not attached."""
        return None if self.attachments is None else self.attachments.on_message(data)

    def group_change(self, worker: WorkerInfo, is_join: bool) -> None:
        """Follow the group of torch's agent, unless this library has started it."""
        if self.attachments is not None:
            change = self._on_entered_group if is_join else self._on_left_group
            self._when_started(lambda: change(worker))

    def _answer(self, handle: Callable[[bytes, "Future[Any]"], None], data: bytes) -> "Future[Any]":
        reply: Future[Any] = Future()
        self._when_started(lambda: handle(data, reply))
        return reply

    def _when_started(self, step: Callable[[], None]) -> None:
        """Run `step` on the loop, in order, once this node is started."""
        self.server.call_on_loop(lambda: step() if self._held is None else self._held.append(step))

    # ── for the failure detector ────────────────────────────────────────────────────────────────

    def linked(self) -> set[str]:
        """Return the peers with an open connection, in either direction."""
        return self.pool.linked() | self.server.sessions.linked()

    def awaited(self) -> set[str]:
        """Return the peers that something waits for, or whose calls run here."""
        return self.pool.awaited_peers() | self.server.sessions.callers()

    def ping(self, peer: str) -> None:
        """Ask the event loops of a peer for a sign of life, on each connection."""
        self.pool.ping(peer)
        self.server.sessions.ping(peer)

    def fail(self, peer: str, error: RpcError) -> None:
        """Fail the calls to a lost peer, and cancel its own."""
        self.pool.on_peer_lost(peer, error)
        self.server.sessions.cancel_calls_of(peer, reason_of(error))

    def on_detached(self, peer: str, text: str) -> None:
        """Note that a peer has closed a connection as it left torch's world to others."""
        if self.attachments is not None:
            self.attachments.on_close(peer, text)

    # ── changes of peers ────────────────────────────────────────────────────────────────────────

    def note(self, kind: Kind, peer: str, reason: str = "") -> None:
        """Tell the readers of the changes of a peer, unless they know already. On the loop.

        Nothing is told of this worker itself, whose connections to itself end too.
        """
        known = self.members.peers.get(peer)
        if known is None:
            return
        if kind == "lost" or (kind == "left" and self.attachments is None):
            rrefs.note_gone(known.number, peer)
        else:
            rrefs.note_back(known.number)
        if self._changes.record(Change(kind, peer, known.rank, reason)):
            self._wake_readers()
            self.registry.on_change(peer)
            if kind in ("left", "lost") and self.attachments is None:
                self._let_go(known)

    def _let_go(self, member: PeerInfo) -> None:
        """Forget, but for the last ones, the members that came later and are gone.

        Until then calls to them say that they have left or are lost. Afterwards they are unknown,
        so a world that changes for weeks does not grow. The first members may be replaced.
        """
        if member.name in self._first:
            return
        self._gone.append(member)
        if len(self._gone) > KEPT_GONE:
            oldest = self._gone.popleft()
            if self.members.is_current(oldest.name, oldest.number) and self._is_gone(oldest.name):
                self._forget(oldest)

    def _is_gone(self, peer: str) -> bool:
        return peer in self.members.leave_messages or peer in self.members.lost_peers

    def _forget(self, member: PeerInfo) -> None:
        self.pool.end_process(member.name, WorkerLeft(member.name))
        self.server.end_process(member.name, left_text(member.name))
        if self._agent is not None:
            self._agent.retire_peer(member)
        self.members.remove(member)
        if self.attachments is not None:
            self.attachments.forget(member.name)
        self.detector.forget(member.name)
        self._changes.forget(member.name)

    def end_changes(self) -> None:
        """End the readers' waits, and tell peers of no more names: this worker leaves."""
        self._changes.close()
        self._wake_readers()
        self.registry.close()

    def _wake_readers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def last_change(self) -> Entry:
        """Return the last entry of the log of changes. In any thread."""
        return self._changes.end

    async def next_change(self, entry: Entry) -> Entry | None:
        """Wait for the entry after that one; None if this worker leaves before. On any loop."""
        if entry.next is None and not self._changes.is_closed:
            await await_on(self.loop, self._wait_for_change(entry))
        return entry.next

    async def _wait_for_change(self, entry: Entry) -> None:
        while entry.next is None and not self._changes.is_closed:
            await self._changed.wait()

    def _admit(self, member: PeerInfo) -> None:
        """Add a member that is there from the start."""
        self.members.put(member)
        if self.attachments is None:
            self._changes.admit([member.name])
        else:
            self.attachments.admit(member.name)

    def _on_entered_group(self, worker: WorkerInfo) -> None:
        if self.members.is_current(worker.name, worker.id):  # it was there from the start
            return
        assert self.attachments is not None
        self.members.put(adopted_peer(worker))
        self.attachments.welcome(worker.name)
        if device_map := device_map_for(worker):
            self._use_device_map(self.members.name, worker.name, device_map)

    def _on_left_group(self, worker: WorkerInfo) -> None:
        """End what waits for a peer that has left torch's group."""
        assert self.attachments is not None
        if not self.members.is_current(worker.name, worker.id):
            return
        error = WorkerLeft(worker.name, LEFT_GROUP)
        self.attachments.dismiss(worker.name)
        self.note("left", worker.name)
        self.members.leave_messages[worker.name] = ""
        self.fail(worker.name, error)
        rrefs.note_gone(worker.id, worker.name)
        self.pool.end_process(worker.name, error)
        self.server.end_process(worker.name, str(error))
        self.departures.settle()
        self._let_go(self.members.peers[worker.name])

    def add(self, member: PeerInfo) -> None:
        """Add a member, or the newer process of one; the loss of the old one may be known."""
        if self.registry.is_closed:  # this worker leaves: torch may have stopped
            return
        assert self._agent is not None
        if (known := self.members.peers.get(member.name)) is None:
            self._agent.add_peer(member)
            self.members.put(member)
        else:
            self.note("lost", member.name, "its process was replaced")
            self._agent.replace_peer(known, member)
            self.members.put(member)
            error = WorkerLost(member.name, "its process was replaced")
            self.pool.end_process(member.name, error)
            self.server.end_process(member.name, replaced_text(member.name))
        self.server.set_device_routes(self._agent.routes)  # its maps may differ
        if host := host_for((member,), self.members.workers[self.members.name]):
            self.server.listen_at(host)

    def announce(self, peer: str) -> None:
        """Watch the process of a peer from now on, and tell of it."""
        self.detector.on_replaced(peer)
        self.note("returned", peer)
        self.note("joined", peer)  # unless it has returned

    def peers(self) -> tuple[str, ...]:
        """Return the peers that have not left, in rank order. In any thread."""
        peers = sorted([*self.members.peers.values()], key=lambda peer: peer.rank)
        is_here = self._changes.has if self.attachments is None else self.attachments.has
        return tuple(peer.name for peer in peers if is_here(peer.name))

    def _on_detached(self, peer: str) -> None:
        self.note("left", peer)

    def _on_attached(self, peer: str, device_map: Mapping[str, str]) -> None:
        self.note("joined", peer)
        self.detector.on_message(peer)
        if device_map:
            self._use_device_map(peer, self.members.name, device_map)
            torch.cuda.init()  # type: ignore[no-untyped-call]

    def _use_device_map(self, worker: str, peer: str, device_map: Mapping[str, str]) -> None:
        """Use the map from the devices of one member to those of another."""
        known = self.members.workers[worker]
        maps = {**known.device_maps, peer: {**device_map}}
        self.members.put(dataclasses.replace(known, device_maps=maps))
        self.use_device_maps()

    def use_device_maps(self) -> None:
        """Let the pool and the server use the device maps of the members."""
        routes = DeviceRoutes.for_worker(self.members.name, self.members.device_maps())
        self.pool.set_device_routes(routes)
        self.server.set_device_routes(routes)

    def _told(self) -> Mapping[str, str]:
        return self.members.leave_messages if self.attachments is None else self.attachments.left()

    def _probe(self, peer: str) -> None:
        """Ping a peer, unless it has never answered."""
        if self.attachments is None or self.attachments.has_answered(peer):
            self.detector.probe(peer)
