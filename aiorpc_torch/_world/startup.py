"""A worker's start: it registers, starts torch's RPC and learns its peers' addresses.

Every wait here has a timeout.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .._aio.tasks import run_to_end
from .._aio.threads import run_in_thread
from .._protocol import endpoints
from .._torch.agent import Agent, PeerInfo, past_name
from .._torch.devices import DeviceRoutes
from .._torch.transport import send, wrap_future
from ..errors import WorldTimeout
from . import network
from .config import WorkerConfig
from .device_maps import resolve_device_maps
from .registration import Registration
from .rejoin import request_entry
from .rendezvous import Rendezvous, WorkerAddress

log = logging.getLogger("aiorpc_torch")

T = TypeVar("T")

UseRoutes = Callable[[DeviceRoutes], None]
"""A callback for the devices that tensors may be on."""

STORE_GRACE = 0.5  # seconds beyond the timeout for a thread that waits for the store's answer
CANCEL_TIMEOUT = 1.0  # seconds for a cancelled start to end
REACH_TIMEOUT = 10.0  # seconds to reach every peer, at most


async def _stop(agent: Agent) -> None:
    await run_in_thread(agent.stop, "aiorpc-stop")
    await run_in_thread(agent.release, "aiorpc-stop")


class Startup:
    """The start of one worker. `use_routes` is called before torch's RPC starts."""

    def __init__(self, config: WorkerConfig, rendezvous: Rendezvous, use_routes: UseRoutes) -> None:
        self._config = config
        self._rendezvous = rendezvous
        self._use_routes = use_routes
        self._agent: Agent | None = None  # set once torch's RPC runs

    async def run(self) -> tuple[Agent, list[PeerInfo]]:
        """Start torch's RPC, and return its agent and the members of the world in rank order.

        After a failure torch's RPC is stopped.

        Raises:
            WorldTimeout, ValueError: as `worker`.
        """
        step: asyncio.Future[Any] = _in_thread(self._register_and_start)
        try:
            members: list[PeerInfo] = await self._in_time(step)
            assert self._agent is not None
            if self._rendezvous.registration.entry:
                members = await self._enter(self._agent, members)
            elif not self._config.is_local and len(members) > 1:
                missing = await self._unreachable(members)
                text = self._unreachable_text(missing) if missing else ""
                ranks = [peer.rank for peer in missing]
                confirm = functools.partial(self._rendezvous.confirm_reachable, ranks, text)
                step = _in_thread(confirm)
                await self._in_time(step)
        except BaseException:
            await run_to_end(asyncio.create_task(self._cancel(step)))
            raise
        return self._agent, members

    async def _in_time(self, step: "asyncio.Future[T]") -> T:
        await asyncio.wait((step,), timeout=self._rendezvous.remaining() + STORE_GRACE)
        if not step.done():  # torch's own timeout of a question to the store may be longer
            raise WorldTimeout(f"the store at {self._rendezvous.host} no longer answers", [0])
        return step.result()

    async def _cancel(self, step: "asyncio.Future[Any]") -> None:
        self._rendezvous.cancel()
        await asyncio.wait((step,), timeout=min(CANCEL_TIMEOUT, self._rendezvous.remaining()))
        step.cancel()
        if self._agent is not None:
            await _stop(self._agent)

    # ── registration, in a thread ───────────────────────────────────────────────────────────────

    def _register_and_start(self) -> list[PeerInfo]:
        """Register, start torch's RPC and return the members."""
        rendezvous = self._rendezvous
        registrations = rendezvous.register()
        worker_id = rendezvous.worker_id(registrations)
        self._agent = _start_agent(
            self._config, worker_id, self._interface(), registrations, self._use_routes
        )
        own = WorkerAddress(worker_id, self._agent.address)
        if not rendezvous.registration.entry:
            rendezvous.publish(own)
            rendezvous.wait_for_addresses()
        members = self._members(own)
        for member in members:
            self._agent.add_peer(member)
        return members

    def _members(self, own: WorkerAddress) -> list[PeerInfo]:
        found = self._rendezvous.members(own)
        every = resolve_device_maps([registration for registration, _ in found], self._config.name)
        return [
            PeerInfo(each.name, each.rank, *address, maps, each.namespace)
            for (each, address), maps in zip(found, every, strict=True)
        ]

    def _interface(self) -> str | None:
        return self._config.interface or network.interface_towards(self._rendezvous.host)

    # ── reaching every peer ─────────────────────────────────────────────────────────────────────

    async def _unreachable(self, members: Sequence[PeerInfo]) -> list[PeerInfo]:
        """Connect with every peer, and return those that are not reached.

        A listener of torch's ends with the first connection that is not torch's, a port scan for
        example. A peer without a connection by then gets none (seen on 2.13 and 2.15).
        """
        peers = [peer for peer in members if peer.name != self._config.name]
        if no_route := [peer for peer in peers if not network.has_route(peer.address)]:
            return no_route
        pings = [wrap_future(send(peer.info, endpoints.ping, b"")) for peer in peers]
        timeout = min(REACH_TIMEOUT, self._rendezvous.remaining() + STORE_GRACE)
        await asyncio.wait(pings, timeout=timeout)
        missing = [
            peer
            for peer, ping in zip(peers, pings, strict=True)
            if not ping.done() or ping.exception()
        ]
        for ping in pings:
            ping.cancel()
        return missing

    def _unreachable_text(self, missing: Sequence[PeerInfo]) -> str:
        peers = ", ".join(f"{peer.name!r} at {peer.address}" for peer in missing)
        return (
            f"all workers registered, but {self._config.name!r} does not reach {peers}. "
            f"This worker uses {network.describe(self._interface())}. Give each worker() "
            "the interface= (or AIORPC_INTERFACE) at which the others reach it"
        )

    # ── entering a running world ────────────────────────────────────────────────────────────────

    async def _enter(self, agent: Agent, members: list[PeerInfo]) -> list[PeerInfo]:
        """Enter if all peers agree, as a new worker or for a dead one; return the members."""
        rendezvous = self._rendezvous
        [me] = (each for each in members if each.name == self._config.name)
        try:
            if rendezvous.registration.joined:
                self._check_namespace(me, members)
            answered = await request_entry(me, [*members, *await self._predecessor(agent)])
            if not answered:
                if not rendezvous.registration.joined:
                    await _in_thread(rendezvous.mark_world_dead)
                raise self._no_answer(members)
            own = WorkerAddress(me.number, agent.address)
            await _in_thread(lambda: rendezvous.publish(own))
            # Each of two workers that enter at once publishes before it reads: one sees the other.
            found = await _in_thread(lambda: self._members(own))
        except BaseException as exc:
            if isinstance(exc, ValueError) or rendezvous.registration.joined:
                await _in_thread(rendezvous.withdraw)
            raise
        self._update(agent, members, found)
        return found

    async def _predecessor(self, agent: Agent) -> list[PeerInfo]:
        """Return the worker that had the name before, under another name, so that it is asked."""
        known = await _in_thread(self._rendezvous.predecessor)
        if known is None:
            return []
        former, address = known
        name = past_name(former.name, address.worker_id)
        found = PeerInfo(name, former.rank, *address, {}, former.namespace)
        agent.add_peer(found)
        return [found]

    def _update(self, agent: Agent, members: list[PeerInfo], found: list[PeerInfo]) -> None:
        """Tell torch of the workers that have entered since it was told of `members`."""
        known = {each.name: each for each in members}
        for member in found:
            if (past := known.get(member.name)) is None:
                agent.add_peer(member)
            elif past.number != member.number:
                agent.replace_peer(past, member)
        self._use_routes(agent.routes)

    def _no_answer(self, members: Sequence[PeerInfo]) -> WorldTimeout:
        name, where = self._config.name, self._config.init_method
        verb = "join" if self._config.join else "rejoin"
        return WorldTimeout(
            f"{name!r} tried to {verb} a world in which no worker answers. If that world has "
            f"ended, or {where} is of an earlier run, start again",
            [each.rank for each in members if each.name != name],
        )

    def _check_namespace(self, me: PeerInfo, members: Sequence[PeerInfo]) -> None:
        """Raise ValueError if the others listen in their own network namespace only."""
        size = self._rendezvous.registration.world_size
        namespaces = {each.namespace for each in members if each.rank < size}
        if len(namespaces) == 1 and me.namespace not in namespaces:
            raise ValueError(
                f"{me.name!r} is on another host or in another container than the first workers "
                "of this world, which all run on one: its workers do not listen on the network"
            )


def _in_thread(step: Callable[[], T]) -> "asyncio.Future[T]":
    return asyncio.ensure_future(run_in_thread(step, "aiorpc-join"))


def _start_agent(
    config: WorkerConfig,
    worker_id: int,
    interface: str | None,
    registrations: Sequence[Registration],
    use_routes: UseRoutes,
) -> Agent:
    resolved = resolve_device_maps(registrations, config.name)
    maps = dict(zip([each.name for each in registrations], resolved, strict=True))
    use_routes(DeviceRoutes.for_worker(config.name, maps))
    log.info("%s uses %s", config.name, network.describe(interface))
    with network.interface_env(interface):
        return Agent(
            config.name,
            worker_id,
            threads=config.threads,
            transports=config.transports,
            channels=config.channels,
            device_maps=maps,
            first_world=all(each.worker_id is None for each in registrations),
        )
