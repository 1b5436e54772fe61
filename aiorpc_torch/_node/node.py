"""A node: everything that this process has as a worker of its world."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.futures import Future

from .._aio.places import lines_of_loop
from .._client.introduction import Introductions
from .._client.pool import ConnectionPool
from .._endpoint.entry_points import completed_future
from .._peers.peers import Event, Peer, Peers
from .._port.port import Port
from .._server.exports import ExportPolicy
from .._server.server import Server
from .._torch.agent import Agent, PeerInfo, adopted_peer, device_map_for
from .._torch.compat import WorkerInfo
from .._torch.devices import DeviceRoutes
from .._wire.plain import reader
from .._wire.where import dump_answer, dump_lines, read_question
from ..errors import RpcError, WorkerLeft
from .attachments import LEFT_GROUP, Attachments
from .config import NodeConfig
from .departures import Departures
from .membership import Children, Membership
from .registry import Registry
from .where import Answers, tracing

_read_leave_message = reader(tuple[str, int, str])


def host_for(peers: Iterable[PeerInfo], me: PeerInfo) -> str | None:
    """Return the address for peers in other network namespaces, None if there are none."""
    if me.namespace and {each.namespace for each in peers} == {me.namespace}:
        return None
    return urlsplit(me.address).hostname


class Node:
    """Everything that this process has as a worker of its world.

    `worker` and `attach` make it the current node of the process, then start it. Until then it
    holds what peers send by torch RPC.
    """

    def __init__(
        self,
        members: Peers,  # the workers; `worker` learns them once torch's RPC has started
        config: NodeConfig,
        children: Children | None = None,
        introductions: Introductions | None = None,  # open the connections (default: by torch RPC)
    ) -> None:
        self.members = members
        self.membership = Membership(members, config.heartbeat, self, children)
        self.attachments: Attachments | None = None
        if members.is_attached:
            self.attachments = Attachments(
                members, self.membership, config.start_timeout, self._use_map_of
            )
        exports = None if config.exports is None else ExportPolicy(config.exports, members.name)
        question = Answers(self).on_question
        self.server = Server(members, self.membership, config.threads, exports, question)
        introductions = introductions or Introductions(members, self.attachments)
        self.pool = ConnectionPool(members, self.membership, introductions, config.max_restarts)
        self.departures = Departures(members, self.pool, self.linked, self.membership.probe)
        self.leaves_alone = False  # this worker's exit does not wait for its peers, which go on
        self.registry = Registry(members, self.server.names, self.membership.wait_until_alive)
        self.loop, self._loop_thread = asyncio.get_running_loop(), get_ident()
        self.manager: Any = None
        self._held: list[Callable[[], None]] | None = []  # until `start`

    def start(
        self,
        host: str | None,  # address for peers in other network namespaces, None if there are none
        workers: Iterable[PeerInfo] = (),  # the members, unless they were known before
        agent: Agent | None = None,  # learns of replacement processes
        port: Port | None = None,  # takes the place of a port of `host`
    ) -> None:
        """Call, watch and serve the peers: all members are known."""
        for worker in workers:
            self.members.admit(worker, is_first=True, is_known=True)
        if self.attachments is not None:
            self.use_device_maps()
        self.membership.agent = agent
        self.pool.open()
        self.membership.start()
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
        self._when_started(lambda: self.membership.on_leave_message(name, process, what, failure))
        return completed_future(None)

    def introduce(self, data: bytes) -> "Future[Any]":
        return self._answer(self.server.introduce, data)

    def loop_lines(self) -> bytes:
        """Return the lines at which the event loop stands."""
        return dump_lines(lines_of_loop(self._loop_thread))

    async def block_of(self, connection: int, data: bytes) -> bytes:
        """Answer a callee where the block stands that has entered its context manager."""
        return dump_answer(0, await tracing(self).of_block(connection, read_question(data)))

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
        self.server.executor.call_on_loop(
            lambda: step() if self._held is None else self._held.append(step)
        )

    # ── for the membership ──────────────────────────────────────────────────────────────────────

    def linked(self) -> set[str]:
        """Return the peers with an open connection, in either direction."""
        return self.pool.linked() | self.server.sessions.linked()

    def end_process(self, peer: Peer, error: RpcError, text: str) -> None:
        """End the connections to a process with `error`, and those from it, which learns `text`."""
        self.pool.end_process(peer.name, error)
        self.server.end_process(peer, text)

    def end_changes(self) -> None:
        """End the readers' waits, and tell peers of no more names: this worker leaves."""
        self.membership.log.is_closed = True
        self.membership.wake()
        self.registry.close()

    # ── changes of peers ────────────────────────────────────────────────────────────────────────

    def add(self, member: PeerInfo) -> None:
        """Add a member, or the newer process of one; the loss of the old one may be known."""
        agent = self.membership.agent
        if agent is not None and self.membership.add(member):
            self.server.set_device_routes(agent.routes)  # its maps may differ
            if host := host_for((member,), self.members.own.member):
                self.server.listen_at(host)

    # ── attached peers ──────────────────────────────────────────────────────────────────────────

    def _on_entered_group(self, worker: WorkerInfo) -> None:
        if self.members.get(worker.name, worker.id) is not None:  # it was there from the start
            return
        assert self.attachments is not None
        peer = self.members.admit(adopted_peer(worker))
        self.membership.wake()
        self.attachments.ask_soon(peer)
        if device_map := device_map_for(worker):
            self._use_device_map(self.members.name, worker.name, device_map)

    def _on_left_group(self, worker: WorkerInfo) -> None:
        """End what waits for a peer that has left torch's group."""
        peer, error = self.members.get(worker.name, worker.id), WorkerLeft(worker.name, LEFT_GROUP)
        self.membership.report(peer, Event.LEAVE_GROUP, error)

    def _use_map_of(self, peer: str, device_map: Mapping[str, str]) -> None:
        """Use the map from the devices of a peer, which has attached, to those of this worker."""
        self._use_device_map(peer, self.members.name, device_map)
        torch.cuda.init()  # type: ignore[no-untyped-call]

    def _use_device_map(self, worker: str, peer: str, device_map: Mapping[str, str]) -> None:
        """Use the map from the devices of one member to those of another."""
        known = self.members.workers[worker]
        maps = {**known.member.device_maps, peer: {**device_map}}
        known.member = dataclasses.replace(known.member, device_maps=maps)
        self.use_device_maps()

    def use_device_maps(self) -> None:
        """Let the pool and the server use the device maps of the members."""
        routes = DeviceRoutes.for_worker(self.members.name, self.members.device_maps())
        self.pool.devices = routes.calls
        self.server.set_device_routes(routes)
