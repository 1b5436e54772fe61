"""A worker's start: it registers, starts torch's RPC and learns its peers' addresses.

Every wait here has a timeout.

torch checks device maps where `init_rpc` starts a world. This library starts its agents one by one
and checks the maps itself, once all workers are known: each worker in the same way.

With one port for each worker torch's RPC listens on the loopback interface alone, and reaches
workers on other hosts by tunnels between the ports. (tests/network/test_one_port.py)
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import urlsplit

import torch

from .._aio.blocking import Blocked, BlockingCall
from .._aio.host import network_namespace
from .._aio.tasks import run_to_end
from .._aio.threads import run_in_thread
from .._directory.directory_messages import Entering
from .._directory.registration import Registration, assign_worker_ids
from .._node.config import WorkerConfig
from .._port import network
from .._port.port import Port
from .._port.tunnels import Tunnels
from .._torch.agent import Agent, PeerInfo, channel_names
from .._torch.devices import DeviceRoutes, NamedDeviceMaps
from .._torch.transport import ping, wrap_future
from ..errors import WorldTimeout
from .directory_client import MIN_STEP, DirectoryClient

log = logging.getLogger("aiorpc_torch")

T = TypeVar("T")

CANCEL_TIMEOUT = 1.0  # seconds for a cancelled start to end
ALL_TO_ALL = 16  # workers up to which each one reaches every other at the start
REACH_TIMEOUT = 10.0  # seconds to reach peers, at most
PING_GRACE = 0.5  # seconds beyond the timeout of the start for a ping
_CHANNELS = ("cuda_ipc", "cma", "cuda_basic", "basic")  # in TensorPipe's order


async def start_step(step: Callable[[], T], timeout: float, left: float | None = None) -> T:
    """Run a step of a start in a thread: it reads files or looks up names, perhaps without end.

    Of the `timeout` of the start there are `left` seconds left, by default all.
    """
    call = BlockingCall(step, "a step of the start does not end")
    try:
        return await call.result(max(timeout if left is None else left, MIN_STEP))
    except Blocked as exc:
        raise WorldTimeout(f"no world within {timeout:g} s: {exc}") from exc


def host_of_port(interface: str | None, rank_0: str | None) -> str:
    """Return the address to listen at: of the interface, else of the one towards rank 0's host."""
    interface = interface or network.interface_towards(rank_0)
    return network.own_address(interface) or network.loopback_address()


def channels_at_port(given: Sequence[str] | None) -> list[str]:
    """Return TensorPipe's channels, of those `given`, that need no further ports nor networks."""
    has_cuda = torch.version.cuda is not None  # else torch does not know the channels for it
    known = [each for each in _CHANNELS if has_cuda or not each.startswith("cuda")]
    return [each for each in known if given is None or each in given]


class OnePort:
    """The port of a worker, which listens at `host`, and the tunnels to others."""

    def __init__(self, config: WorkerConfig, host: str) -> None:
        if config.tls is not None:
            config.tls.check()
        self.port = Port(host, config.port or 0, config.tls, config.heartbeat)
        self._tunnels = Tunnels(self.port)
        self._namespace = network_namespace()

    def registration(self, own: Registration) -> Registration:
        """Return the registration of this worker, with its port."""
        is_secure = self.port.tls is not None
        return replace(own, endpoint=self.port.endpoint, is_secure=is_secure)

    def address_of(self, peer: PeerInfo) -> str:
        """Return the address at which torch's RPC of this process reaches a peer."""
        if peer.namespace and peer.namespace == self._namespace:
            return peer.address
        return self._tunnels.open(peer.name, peer.endpoint, peer.address)

    def forget(self, peer: PeerInfo) -> None:
        """Close the tunnel to a peer, whose process has ended."""
        self._tunnels.close(peer.name)

    def failure(self, peer: str) -> str:
        """Return why a peer was not reached, "" if that is unknown."""
        return self._tunnels.failure(peer)


@dataclass(eq=False)
class Startup:
    """The start of one worker. `use_routes` takes the devices that tensors may be on."""

    config: WorkerConfig
    directory: DirectoryClient
    use_routes: Callable[[DeviceRoutes], None]
    one_port: OnePort | None = None
    _interface: str | None = None
    _starting: asyncio.Future[None] | None = None
    _agent: Agent | None = None  # set once torch's RPC runs

    async def run(self) -> tuple[Agent, list[PeerInfo]]:
        """Start torch's RPC, and return its agent and the members of the world in rank order.

        After a failure torch's RPC is stopped.
        """
        try:
            return await self._run()
        except BaseException as exc:
            if isinstance(exc, asyncio.CancelledError):
                self.directory.give_up()
            await run_to_end(asyncio.create_task(self._cancel()))
            raise

    async def _run(self) -> tuple[Agent, list[PeerInfo]]:
        directory, config = self.directory, self.config
        maps = await self._register_and_start()
        assert self._agent is not None
        # A joining worker is added by all: it need not be reached before.
        is_reached = directory.registration.entry > 0 or config.is_local or config.world_size == 1
        members = await directory.publish(self._agent.address, maps, is_reached)
        for member in members:
            self._agent.add_peer(member)
        self.use_routes(self._agent.routes)
        if not is_reached:
            missing = await self._unreachable(members)
            text = self._unreachable_text(missing) if missing else ""
            await directory.confirm([peer.rank for peer in missing], text)
        return self._agent, members

    async def _register_and_start(self) -> NamedDeviceMaps:
        """Register, start torch's RPC, and return this worker's device maps."""
        directory = self.directory
        answer = await directory.register()
        registrations, own = answer.registrations, directory.registration
        if isinstance(answer, Entering):
            worker_id = answer.worker_id
        else:
            worker_id = assign_worker_ids(registrations)[own.rank]
        every = resolve_device_maps(registrations, own.name)
        maps = {each.name: of for each, of in zip(registrations, every, strict=True)}
        is_first = all(each.worker_id is None for each in registrations)
        self._interface = await start_step(
            self._find_interface, self.config.start_timeout, directory.remaining()
        )
        step = lambda: self._start_agent(worker_id, maps, first_world=is_first)  # noqa: E731
        self._starting = asyncio.ensure_future(run_in_thread(step, "aiorpc-join"))
        await asyncio.wait((self._starting,))
        self._starting.result()
        return maps[own.name]

    def _start_agent(
        self, worker_id: int, maps: dict[str, NamedDeviceMaps], *, first_world: bool
    ) -> None:
        config, interface = self.config, self._interface
        channels = channel_names(config.channels)
        self.use_routes(DeviceRoutes.for_worker(config.name, maps))
        log.info("%s uses %s", config.name, network.describe(interface))
        if (one_port := self.one_port) is not None:
            interface = network.loopback_only()
            channels = channels_at_port(channels)
        with network.interface_env(interface):
            self._agent = Agent(
                config.name,
                worker_id,
                threads=config.threads,
                transports=config.transports,
                channels=channels,
                device_maps=maps,
                first_world=first_world,
                routes=one_port,
            )
        if one_port is not None:
            url = urlsplit(self._agent.address)
            assert url.hostname is not None
            assert url.port is not None
            one_port.port.torch = url.hostname, url.port

    async def _cancel(self) -> None:
        if self._starting is not None:
            await asyncio.wait((self._starting,), timeout=CANCEL_TIMEOUT)
        if self._agent is not None:
            await run_in_thread(self._agent.stop, "aiorpc-stop")
            await run_in_thread(self._agent.release, "aiorpc-stop")

    def _find_interface(self) -> str | None:
        """Return the interface for torch's RPC, None for what this machine's name resolves to."""
        found = self.config.interface or network.interface_towards(self.directory.host)
        if found is None and self.one_port is None:
            network.look_up_own_name()  # before torch does, which names nothing
        return found

    # ── reaching peers ──────────────────────────────────────────────────────────────────────────

    async def _unreachable(self, members: Sequence[PeerInfo]) -> list[PeerInfo]:
        """Connect with `peers_to_reach`, and return the peers that are not reached."""
        others = (peer for peer in members if peer.name != self.config.name)
        # Of all peers: the first message to one without a route would end this process.
        if no_route := [peer for peer in others if not network.has_route(peer.address)]:
            return no_route
        peers = peers_to_reach(members, self.directory.registration.rank)
        pings = [wrap_future(ping(peer.info)) for peer in peers]
        timeout = min(REACH_TIMEOUT, self.directory.remaining() + PING_GRACE)
        await asyncio.wait(pings, timeout=timeout)
        missing = [
            peer
            for peer, answer in zip(peers, pings, strict=True)
            if not answer.done() or answer.exception()
        ]
        for answer in pings:
            answer.cancel()
        return missing

    def _unreachable_text(self, missing: Sequence[PeerInfo]) -> str:
        peers = []
        for peer in missing:
            reason = "" if self.one_port is None else self.one_port.failure(peer.name)
            text = f"{peer.name!r} at {peer.endpoint or peer.address}"
            peers.append(f"{text} ({reason})" if reason else text)
        return (
            f"all workers registered, but {self.config.name!r} does not reach {', '.join(peers)}. "
            f"This worker uses {network.describe(self._interface)}. Give each worker() "
            "the interface= (or AIORPC_INTERFACE) at which the others reach it"
        )


def peers_to_reach(members: Sequence[PeerInfo], own_rank: int) -> list[PeerInfo]:
    """Return the peers with which a worker connects at the start; `members` are in rank order.

    Up to `ALL_TO_ALL` workers these are all peers. A listener of torch's ends with the first
    connection that is not torch's, a port scan for example. A peer without a connection by then
    gets none (seen on 2.13 and 2.15).

    In larger worlds a connection of each pair would be N squared of them, with several descriptors
    each. So each worker connects with those 1, 2, 4, 8, ... places further, modulo N, and log2(N)
    others with it. Ranks of one host are neighbours, so these are on several hosts. Any other pair
    connects at its first call, whose error names the address.
    """
    size = len(members)
    if size <= ALL_TO_ALL:
        return [peer for peer in members if peer.rank != own_rank]
    own = next(place for place, peer in enumerate(members) if peer.rank == own_rank)
    distances = (1 << power for power in range((size - 1).bit_length()))
    return [members[(own + distance) % size] for distance in distances]


# ── device maps ─────────────────────────────────────────────────────────────────────────────────


def resolve_device_maps(
    registrations: Sequence[Registration], entering: str = ""
) -> list[NamedDeviceMaps]:
    """Return every worker's device maps, in order; "auto" becomes the same index on both sides.

    torch takes a worker's own maps at its start. So a first worker has a map for one that joins
    later only if it names that one; with "auto" it has none. Of those that joined, only the maps of
    this worker, which is `entering`, are checked, and those for it.

    The work is linear in the workers and in the maps. With "auto" the first workers that have as
    many devices share their maps; one that has joined has its own.
    """
    counts = {each.name: each.devices for each in registrations}
    with_devices = [each for each in registrations if each.devices]

    @functools.cache
    def auto(devices: int, last_joined: int) -> NamedDeviceMaps:
        known = (each for each in with_devices if not each.joined or each.rank <= last_joined)
        return {
            each.name: {f"cuda:{n}": f"cuda:{n}" for n in range(min(devices, each.devices))}
            for each in known
        }

    found = []
    for each in registrations:
        if isinstance(each.device_maps, str):  # valid: both sides have these devices
            last_joined = each.rank if each.joined else -1
            found.append(auto(each.devices, last_joined) if each.devices else {})
            continue
        for peer, devices in each.device_maps.items():
            if not each.joined or entering in (each.name, peer):
                _check(each, peer, devices, counts, is_own=each.name == entering)
        found.append(each.device_maps)
    return found


def _check(
    registration: Registration,
    peer: str,
    devices: Mapping[str, str],
    counts: Mapping[str, int],
    *,
    is_own: bool,
) -> None:
    worker, mapped = registration.name, dict[str, str]()
    # A first worker may have a map for one that joins later.
    if peer not in counts and (registration.joined or is_own):
        text = (
            f"worker {worker!r} has a device map for {peer!r}, which is not a worker of this "
            f"world: {', '.join(counts)}"
        )
        if registration.joined:
            raise ValueError(text)
        log.warning("%s. It counts once %r joins", text, peer)
    for own, theirs in devices.items():
        entry = f"worker {worker!r} maps its {own} to {theirs} of {peer!r}"
        for owner, device in ((worker, own), (peer, theirs)):
            if (count := counts.get(owner)) is not None and torch.device(device).index >= count:
                has = f"{count or 'no'} CUDA device{'s' * (count != 1)}"
                raise ValueError(f"{entry}, but {owner!r} has {has}")
        if theirs in mapped:
            raise ValueError(
                f"{entry}, and its {mapped[theirs]} too: map each device to a different one"
            )
        mapped[theirs] = own
