"""A worker's life: it joins its world, serves on the running loop, and leaves.

It puts together what the rooms below know: how workers meet, how torch's RPC starts and stops, how
calls come in and go out, who is alive. Processes are not its subject: those of a local world are
`_local`'s.
"""

import contextlib
import functools
import gc
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from urllib.parse import urlsplit

from .._aio.interruption import Interruption
from .._aio.signals import orderly
from .._aio.threads import daemon, run_blocking
from .._client import pool
from .._client.pool import Outbox
from .._protocol import endpoints
from .._protocol.handshake import Party
from .._server.exports import Export, Exports, as_exports
from .._server.server import Server
from .._torch.agent import Agent, Member, is_running
from .._torch.devices import DeviceMaps
from ..errors import WorldTimeout
from . import network
from .config import OnFailure, Place, Worker
from .environment import all_are_here, meeting_place, number
from .failure_detector import Vigil
from .rejoin import Welcome, announce
from .rendezvous import Meeting
from .shutdown import Leaving, describe
from .startup import join

__all__ = ("worker",)

log = logging.getLogger("aiorpc_torch")


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
    on_failure: OnFailure = "continue",
    exports: Sequence[Export] | None = None,
    freeze_gc: bool = True,
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
        transports: of TensorPipe, which carries large and CUDA tensors, in order of preference;
            by default `["uv"]`, TCP, which idles at no cost. Shared memory (`["shm", "uv"]`) moves
            large tensors faster on one host and takes most of a core for polling.
        device_maps: for each peer, which of this worker's CUDA devices stand for which of the
            peer's, as torch's `device_maps`: `{"ps": {"cuda:0": "cuda:1"}}`. Arguments on them
            arrive on the peer's, and its results on these. "auto": the same index on both sides,
            for every peer. A tensor on any other device cannot be sent.
        start_timeout: seconds for the world to be complete.
        stop_timeout: seconds that exit waits for peers.
        heartbeat: seconds of silence after which a peer for whom something waits here is lost: it
            is frozen, or cut off. (A peer that dies is noticed at once.)
        interface: of the network, through which this worker speaks, such as `"eth1"`; by default
            the environment's AIORPC_INTERFACE, or GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME, or the
            interface that leads to rank 0's address.
        on_failure: what an exception in a peer's block, or its death, means for this worker's:
            "continue", its calls to that peer raise `WorkerLost`; "stop", the block is cancelled
            and `WorkerLost` raised from it.
        exports: what this worker answers to, by default whatever can be imported: classes, whose
            instances' public methods may be called (those of subclasses and inherited ones too) and
            of which objects may be created; functions; names of modules, for all that they and
            the modules in them define. Any other call raises `NotExported` at its caller, and its
            arguments are not unpickled. `fetch` is answered to whoever holds an RRef. It says what
            the calls of this library reach, and is no sandbox: arguments are pickles, which may
            name anything, and torch's own `rpc_sync` runs what it is given.
        freeze_gc: whether objects that exist when the world starts are left out of garbage
            collections until it ends (`gc.freeze`). torch alone has 200,000, through which a full
            collection takes about 0.1 s, in which this worker answers nobody.

    Raises:
        WorldTimeout: if ranks are missing when `start_timeout` is over; it names them.
        ValueError: if the world is not described, here or in the environment, or if there is no
            such interface; if two workers have one rank or one name, or not the same world size:
            it names both; if a device map names a worker or a device that there is not, or one
            of the peer's devices twice: it says whose.
        RuntimeError: if this process is in a world already.
    """
    rank = number("RANK", rank)
    world_size = number("WORLD_SIZE", world_size)
    interfaces = network.asked(interface)
    if not interfaces and all_are_here(init_method, world_size):
        interfaces = network.only_here()
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
            on_failure=on_failure,
            exports=None if exports is None else as_exports(exports),
            freeze_gc=freeze_gc,
        )
        with orderly():
            async with take_place(place) as me:
                yield me


@contextlib.asynccontextmanager
async def take_place(place: Place) -> AsyncIterator[Worker]:
    """Be the worker that `place` describes."""
    if is_running():
        raise RuntimeError("this process is in a world already, and torch knows one at a time")
    exports = None if place.exports is None else Exports(place.exports)
    server = Server(place.name, place.threads, exports)
    endpoints.serve(server)  # before torch starts: a peer that is quicker may call already
    meeting = None
    try:
        if place.world_size > 1:
            meeting = Meeting(place.init_method, place.seat(), place.start_timeout)
        agent, members = await join(place, meeting, server.use)
        with _frozen(place.freeze_gc):
            async with _live(place, server, meeting, agent, members) as me:
                yield me
    finally:
        endpoints.serve(None)
        pool.use(None)
        if meeting is not None:
            meeting.close()


@contextlib.contextmanager
def _frozen(wanted: bool) -> Iterator[None]:
    """Leave what exists now out of garbage collections, unless somebody has frozen it already."""
    if not wanted or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.asynccontextmanager
async def _live(
    place: Place, server: Server, meeting: Meeting | None, agent: Agent, members: list[Member]
) -> AsyncIterator[Worker]:
    """From the start of torch's RPC to its end."""
    server.peers.know({each.name: each.number for each in members})
    comeback = 0 if meeting is None else meeting.seat.comeback
    party = Party(place.name, members[place.rank].number)
    outbox = Outbox(party, members)
    pool.use(outbox)
    vigil = Vigil(outbox, server, members, place.heartbeat)
    peers = {each.name: each for each in members if each.name != place.name}
    if meeting is not None:
        vigil.has_left = functools.partial(_has_left, meeting, peers)
    server.peers.welcome(Welcome(agent, outbox, server, vigil, peers).met)
    failure = ""
    try:
        if comeback:
            await announce(members[place.rank], members)
        await server.open(party, _host_for_others(members[place.rank], members))
        me = Worker(place.name, place.rank, place.world_size, tuple(peers), comeback, vigil)
        log.info("%r: the world is complete", me)
        async with _ended_by_others(place, vigil):
            yield me
    except BaseException as exc:
        failure = describe(exc)
        raise
    finally:
        patience = place.stop_timeout
        leaving = Leaving(
            outbox, server, vigil, agent, meeting, peers=peers, patience=patience, failure=failure
        )
        await leaving.run()


async def _has_left(meeting: Meeting, peers: dict[str, Member], peer: str) -> bool:
    """Return whether a peer's block has ended in order, as far as the store can say."""
    rank = peers[peer].rank
    try:
        found = await run_blocking(daemon("aiorpc-leave"), lambda: meeting.have_left([rank]))
    except WorldTimeout:
        return False
    return rank in found


def _host_for_others(me: Member, members: Sequence[Member]) -> str | None:
    """Return the address to listen at for peers in other network namespaces, None without any."""
    if me.namespace and {each.namespace for each in members} == {me.namespace}:
        return None
    return urlsplit(me.address).hostname


@contextlib.asynccontextmanager
async def _ended_by_others(place: Place, vigil: Vigil) -> AsyncIterator[None]:
    if place.on_failure == "continue":
        yield
        return
    async with Interruption() as interruption:
        vigil.on_loss = interruption.end
        try:
            yield
        finally:
            vigil.on_loss = None
