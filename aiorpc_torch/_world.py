"""A worker's life: it joins its world, serves on the running loop, and leaves.

With `_bridge` the only room that knows how torch starts and stops. Processes are not its subject:
those of a local world are `_local`'s.
"""

import asyncio
import contextlib
import logging
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch._C._distributed_rpc import _get_current_rpc_agent, _is_current_rpc_agent_set
from torch.distributed import rpc
from torch.distributed.rpc import api

from . import _doors, _interfaces, _outbox
from ._environment import all_are_here, meeting_place, number
from ._leaving import Leaving
from ._outbox import Outbox
from ._rendezvous import Meeting
from ._server import Server
from ._threads import daemon, run_blocking
from ._vigil import Vigil
from .errors import WorldTimeout

__all__ = ("Worker", "worker")

log = logging.getLogger("aiorpc_torch")

T = TypeVar("T")

GRACE = 0.5  # seconds beyond its time after which a thread that a store holds is left to it
DeviceMaps = Mapping[str, Mapping[Any, Any]]


@dataclass(frozen=True, slots=True)
class Worker:
    """This process as a member of a world: what `worker()` and `local_world()` yield."""

    name: str
    rank: int
    world_size: int
    peers: tuple[str, ...]
    """The names of the other workers, in rank order."""

    def __repr__(self) -> str:
        return f"<Worker {self.name}, rank {self.rank} of {self.world_size}>"


@dataclass(frozen=True, slots=True)
class Place:
    """Which worker of which world to be, and how. What `worker()` is given, checked."""

    name: str
    rank: int
    world_size: int
    init_method: str
    threads: int = 16
    transports: Sequence[str] | None = None
    device_maps: DeviceMaps = field(default_factory=dict)
    start_timeout: float = 60.0
    stop_timeout: float | None = 10.0
    heartbeat: float = 10.0
    interfaces: _interfaces.Choice = field(default_factory=dict)
    is_local: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is from 0 to world_size - 1, not {self.rank} of {self.world_size}"
            )
        if self.threads < 1:
            raise ValueError(f"threads is at least 1, not {self.threads}")
        if not 0.0 < self.heartbeat < float("inf"):
            raise ValueError(f"heartbeat is seconds, more than 0, not {self.heartbeat!r}")


@contextlib.asynccontextmanager
async def worker(
    name: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    threads: int = 16,
    transports: Sequence[str] | None = None,
    device_maps: DeviceMaps | None = None,
    start_timeout: float = 60.0,
    stop_timeout: float = 10.0,
    heartbeat: float = 10.0,
    interface: str | None = None,
) -> AsyncIterator[Worker]:
    """Be a worker of a world: `async with worker("trainer0", rank=1, world_size=3) as me`.

    The worker serves on the running loop from entry to exit. Exit waits, still serving, until
    every live peer is done too, and always returns. An exception inside leaves at once and tells
    the peers, whose calls to this worker then raise `WorkerLost`.

    Args:
        name: by which others call it; by default `worker{rank}`.
        rank: its number, from 0; by default the environment's RANK, which torchrun sets.
        world_size: how many workers there are; by default the environment's WORLD_SIZE.
        init_method: where they meet, `tcp://host:port` or `file:///path`; by default the
            environment's MASTER_ADDR and MASTER_PORT. A world of one needs none.
        threads: of torch's RPC, and as many again for plain `def` methods.
        transports: of TensorPipe, in order of preference; by default torch's choice. Shared memory
            (`"shm"`) answers fastest and polls while it waits, `"uv"` idles at no cost.
        device_maps: for each peer, this worker's devices to the peer's, as torch's `device_maps`.
        start_timeout: seconds for the world to be complete.
        stop_timeout: seconds that exit waits for peers.
        heartbeat: seconds of silence after which a peer for whom something waits here is lost: it
            is frozen, or cut off. (A peer that dies is noticed at once.)
        interface: of the network, through which this worker speaks, such as `"eth1"`; by default
            the environment's AIORPC_INTERFACE, or GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME, or the
            interface that leads to rank 0's address.

    Raises:
        WorldTimeout: if ranks are missing when `start_timeout` is over; it names them.
        ValueError: if the world is not described, here or in the environment, or if there is no
            such interface.
        RuntimeError: if this process is in a world already.
    """
    rank = number("RANK", rank)
    world_size = number("WORLD_SIZE", world_size)
    interfaces = _interfaces.asked(interface)
    if not interfaces and all_are_here(init_method, world_size):
        interfaces = _interfaces.only_here()
    with meeting_place(init_method, world_size) as where:
        place = Place(
            name=name or f"worker{rank}",
            rank=rank,
            world_size=world_size,
            init_method=where,
            threads=threads,
            transports=transports,
            device_maps=device_maps or {},
            start_timeout=start_timeout,
            stop_timeout=stop_timeout,
            heartbeat=heartbeat,
            interfaces=interfaces,
        )
        async with take_place(place) as me:
            yield me


@contextlib.asynccontextmanager
async def take_place(place: Place) -> AsyncIterator[Worker]:
    """Be the worker that `place` describes."""
    if _is_current_rpc_agent_set():
        raise RuntimeError("this process is in a world already, and torch knows one at a time")
    server = Server(place.name, place.threads, _devices(place))
    _doors.serve(server)  # before torch starts: a peer that is quicker may call already
    try:
        me = await _join(place)
        outbox, infos = _outbox.current(), _get_current_rpc_agent().get_worker_infos()
        vigil = Vigil(outbox, server, infos, place.heartbeat)
        server.open()
        log.info("%r: the world is complete", me)
        clean = False
        try:
            yield me
            clean = True
        finally:
            vigil.close()
            await Leaving(
                outbox,
                server,
                me.peers,
                patience=place.stop_timeout,
                failed=not clean,
                alone=_worlds > 1,
            ).run()
            _keep.clear()
    finally:
        _doors.serve(None)
        _outbox.use(None)


# ── joining ─────────────────────────────────────────────────────────────────────────────────────


async def _join(place: Place) -> Worker:
    meeting = Meeting(place.init_method, place.rank, place.world_size, place.start_timeout)
    try:
        names = await _within(
            meeting.remaining() + GRACE,
            lambda: run_blocking(daemon("aiorpc-join"), lambda: meeting.sign_in(place.name)),
            lambda: WorldTimeout(f"the store at {meeting.host} no longer answers", [0]),
        )
    finally:
        meeting.leave()
    await _start(place, meeting)
    _outbox.use(Outbox(place.name, _get_current_rpc_agent().get_worker_infos()))
    _keep[:] = [meeting]
    peers = tuple(name for name in names if name != place.name)
    return Worker(place.name, place.rank, place.world_size, peers)


async def _start(place: Place, meeting: Meeting) -> None:
    through = place.interfaces

    def start() -> None:
        nonlocal through
        through = through or _interfaces.found(meeting.host)
        log.info("%s speaks through %s", place.name, _interfaces.in_words(through))
        with _interfaces.bound(through):
            _init_rpc(place)

    try:
        await _within(
            meeting.remaining() + 5.0,
            lambda: run_blocking(daemon("aiorpc-init"), start),
            lambda: WorldTimeout(
                "every worker came, but torch's start did not end: one has died, or one does not "
                f"reach another. {_advice(through)}"
            ),
        )
    except RuntimeError as exc:
        if not place.is_local:
            exc.add_note(_advice(through))
        raise


async def _within(
    seconds: float, work: Callable[[], Awaitable[T]], late: Callable[[], WorldTimeout]
) -> T:
    """`work`, or the error that `late` makes once that time is up."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work()
    except TimeoutError:
        if limit.expired():
            raise late() from None
        raise


def _advice(through: _interfaces.Choice) -> str:
    return (
        f"This worker spoke through {_interfaces.in_words(through)}. If others do not reach that, "
        "give worker() the interface= (or AIORPC_INTERFACE) that they reach."
    )


_worlds = 0  # that this process has joined
_keep: list[Meeting] = []  # the store of the world this process is in: rank 0's is its server


def _init_rpc(place: Place) -> None:
    global _worlds
    _worlds += 1
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=place.threads,
        init_method=place.init_method,
        device_maps={peer: dict(devices) for peer, devices in place.device_maps.items()},
        _transports=None if place.transports is None else list(place.transports),
    )
    if place.is_local:
        _forget_earlier_worlds()
    # torch warns of the process group that its own init_rpc makes (2.11 to 2.15).
    warnings.filterwarnings("ignore", message="You are using a Backend .*ProcessGroupGloo")
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        place.name,
        rank=place.rank,
        world_size=place.world_size,
        rpc_backend_options=options,
    )


def _forget_earlier_worlds() -> None:
    # torch counts the worlds of a process and uses the counts as keys, so one that has left a
    # world and a fresh one never meet (seen on 2.13 and 2.15, tests/test_worlds.py). A local
    # world's store is new, so its count may start again.
    rpc._init_counter = 0
    api._all_gather_sequence_id.clear()
    api._all_gather_sequence_id_to_states.clear()


def _devices(place: Place) -> list[torch.device]:
    used = {torch.device(own) for devices in place.device_maps.values() for own in devices}
    return sorted((device for device in used if device.type == "cuda"), key=lambda d: d.index)
