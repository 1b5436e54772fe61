"""A worker's life: it joins its world, serves on the running loop, and leaves.

With `_bridge` the only room that knows how torch starts and stops. Processes are not its subject:
those of a local world are `_local`'s.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_rpc import _get_current_rpc_agent, _is_current_rpc_agent_set
from torch.distributed import rpc
from torch.distributed.rpc import api

from . import _doors, _outbox
from ._exports import Export, Exports, as_exports
from ._leaving import Leaving
from ._outbox import Outbox
from ._rendezvous import Meeting
from ._server import Server
from ._threads import daemon, run_blocking
from ._vigil import Vigil
from .errors import WorldTimeout

__all__ = ("Worker", "worker")

log = logging.getLogger("aiorpc_torch")

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
    exports: tuple[Export, ...] | None = None
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
    exports: Sequence[Export] | None = None,
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
        exports: what this worker answers to, by default whatever can be imported: classes, whose
            instances' public methods may be called (those of subclasses and inherited ones too) and
            of which objects may be created; functions; names of modules, for all that they and
            the modules in them define. Any other call raises `NotExported` at its caller, and its
            arguments are not unpickled. `fetch` is answered to whoever holds an RRef. It says what
            the calls of this library reach, and is no sandbox: arguments are pickles, which may
            name anything, and torch's own `rpc_sync` runs what it is given.

    Raises:
        WorldTimeout: if ranks are missing when `start_timeout` is over; it names them.
        ValueError: if the world is not described, here or in the environment.
        RuntimeError: if this process is in a world already.
    """
    rank = _number("RANK", rank)
    world_size = _number("WORLD_SIZE", world_size)
    with _meeting_place(init_method, world_size) as where:
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
            exports=None if exports is None else as_exports(exports),
        )
        async with take_place(place) as me:
            yield me


@contextlib.asynccontextmanager
async def take_place(place: Place) -> AsyncIterator[Worker]:
    """Be the worker that `place` describes."""
    if _is_current_rpc_agent_set():
        raise RuntimeError("this process is in a world already, and torch knows one at a time")
    exports = None if place.exports is None else Exports(place.exports)
    server = Server(place.name, place.threads, _devices(place), exports)
    _doors.serve(server)  # before torch starts: a peer that is quicker may call already
    try:
        me = await _join(place, server)
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


async def _join(place: Place, server: Server) -> Worker:
    meeting = Meeting(place.init_method, place.rank, place.world_size, place.start_timeout)
    try:
        names = await run_blocking(daemon("aiorpc-join"), lambda: meeting.sign_in(place.name))
        server.members = frozenset(names)  # nobody can call before torch starts
    finally:
        meeting.leave()
    try:
        async with asyncio.timeout(meeting.remaining() + 5.0):
            await run_blocking(daemon("aiorpc-init"), lambda: _init_rpc(place))
    except TimeoutError:
        raise WorldTimeout(
            "every worker came, but torch's start did not end: one has died"
        ) from None
    _outbox.use(Outbox(place.name, _get_current_rpc_agent().get_worker_infos()))
    _keep[:] = [meeting]
    peers = tuple(name for name in names if name != place.name)
    return Worker(place.name, place.rank, place.world_size, peers)


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
    with _loopback() if place.is_local else contextlib.nullcontext():
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


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Let gloo and TensorPipe bind to the loopback interface only, unless told otherwise."""
    names = [name for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME") if name not in os.environ]
    interface = "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
    os.environ.update(dict.fromkeys(names, interface))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def _devices(place: Place) -> list[torch.device]:
    used = {torch.device(own) for devices in place.device_maps.values() for own in devices}
    return sorted((device for device in used if device.type == "cuda"), key=lambda d: d.index)


# ── what the environment says ───────────────────────────────────────────────────────────────────


def _number(variable: str, given: int | None) -> int:
    if given is not None:
        return given
    try:
        return int(os.environ[variable])
    except KeyError:
        raise ValueError(
            f"worker() needs {variable.lower()}=, or {variable} in the environment, "
            "where torchrun puts it"
        ) from None


@contextlib.contextmanager
def _meeting_place(init_method: str | None, world_size: int) -> Iterator[str]:
    if init_method is not None:
        yield init_method
    elif world_size == 1:
        with new_meeting_place() as where:
            yield where
    else:
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise ValueError(
                f"worker() needs init_method=, or {' and '.join(missing)} in the environment"
            )
        yield "env://"


@contextlib.contextmanager
def new_meeting_place() -> Iterator[str]:
    """A file store's address for a new world on this machine: no port is opened for it."""
    with tempfile.TemporaryDirectory(prefix="aiorpc-", ignore_cleanup_errors=True) as folder:
        yield f"file://{folder}/store"
