"""A worker's life: it joins its world, serves on the running loop, and leaves.

It puts together what the rooms below know: how workers meet, how torch's RPC starts and stops, how
calls come in and go out, who is alive. Processes are not its subject: those of a local world are
`_local`'s.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from . import _doors, _outbox
from ._agent import (
    Agent,
    DeviceMaps,
    Member,
    is_running,
    keeps_number,
    local_devices,
    plain_maps,
)
from ._environment import loopback, meeting_place, number_from
from ._interruption import Interruption
from ._leaving import Leaving, describe
from ._outbox import Outbox
from ._rendezvous import Meeting
from ._seat import Seat
from ._server import Server
from ._signals import orderly
from ._threads import daemon, run_blocking
from ._version import __version__
from ._vigil import Vigil
from ._welcome import Welcome, announce
from .errors import WorkerLost, WorldTimeout

__all__ = ("Worker", "worker")

log = logging.getLogger("aiorpc_torch")

OnFailure = Literal["continue", "stop"]

LEAVE = 1.0  # seconds for a start that is given up to come to its end
LINKS = 1 << 20  # numbers of links for each process that is a worker


@dataclass(frozen=True, slots=True)
class Worker:
    """This process as a member of a world: what `worker()` and `local_world()` yield."""

    name: str
    rank: int
    world_size: int
    peers: tuple[str, ...]
    """The names of the other workers, in rank order."""
    comeback: int = 0
    """0; for a process that took the place of one that died, how many had come back by then."""
    _vigil: Vigil | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<Worker {self.name}, rank {self.rank} of {self.world_size}>"

    async def wait_for(self, peer: str) -> None:
        """Return when `peer` is there: at once, unless it is lost; then when it has come back.

            except WorkerLost as lost:
                await me.wait_for(lost.worker)

        A worker comes back when its process is started again (`restart=` of `local_world` and
        `run_local`, or whatever starts yours), or when it was frozen or cut off and is no more.
        What the old process held is gone with it: create it anew. Bound the wait with
        `asyncio.timeout`.

        Raises:
            ValueError: if there is no such peer.
            WorkerLost: if it is known that it will not come back.
        """
        if peer not in self.peers:
            raise ValueError(f"no worker {peer!r} beside this one: {', '.join(self.peers)}")
        assert self._vigil is not None
        await self._vigil.presence(peer)

    def _give_up(self, peer: str, failure: BaseException) -> None:
        if self._vigil is not None:
            error = WorkerLost(peer, f"it is not started again: {failure}")
            error.__cause__ = failure
            self._vigil.give_up(peer, error)


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
    on_failure: OnFailure = "continue"
    is_local: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is from 0 to world_size - 1, not {self.rank} of {self.world_size}"
            )
        if not re.fullmatch(r"[A-Za-z0-9_:-]{1,127}", self.name):
            raise ValueError(
                "a worker's name is of up to 127 letters, digits, '-', '_' and ':', which "
                f"{self.name!r} is not"
            )
        if self.threads < 1:
            raise ValueError(f"threads is at least 1, not {self.threads}")
        if not 0.0 < self.heartbeat < float("inf"):
            raise ValueError(f"heartbeat is seconds, more than 0, not {self.heartbeat!r}")
        if self.on_failure not in ("continue", "stop"):
            raise ValueError(f'on_failure is "continue" or "stop", not {self.on_failure!r}')

    def seat(self) -> Seat:
        """What this worker says of itself to the others."""
        return Seat(
            self.name,
            self.rank,
            self.world_size,
            __version__,
            keeps_number(),
            plain_maps(self.device_maps),
        )


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
    on_failure: OnFailure = "continue",
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
        on_failure: what an exception in a peer's block, or its death, means for this worker's:
            "continue", its calls to that peer raise `WorkerLost`; "stop", the block is cancelled
            and `WorkerLost` raised from it.

    Raises:
        WorldTimeout: if ranks are missing when `start_timeout` is over; it names them.
        ValueError: if the world is not described, here or in the environment; if two workers have
            one rank or one name, or not the same world size: it names both.
        RuntimeError: if this process is in a world already.
    """
    rank = number_from("RANK", rank)
    world_size = number_from("WORLD_SIZE", world_size)
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
            on_failure=on_failure,
        )
        with orderly():
            async with take_place(place) as me:
                yield me


@contextlib.asynccontextmanager
async def take_place(place: Place) -> AsyncIterator[Worker]:
    """Be the worker that `place` describes."""
    if is_running():
        raise RuntimeError("this process is in a world already, and torch knows one at a time")
    server = Server(place.name, place.threads, local_devices(place.device_maps))
    _doors.serve(server)  # before torch starts: a peer that is quicker may call already
    try:
        meeting = None if place.world_size == 1 else _meeting(place)
        agent, members = await _join(place, meeting)
        comeback = 0 if meeting is None else meeting.seat.comeback
        outbox = Outbox(place.name, members, comeback * LINKS)
        _outbox.use(outbox)
        vigil = Vigil(outbox, server, members, place.heartbeat)
        peers = {each.name: each for each in members if each.name != place.name}
        server.welcome(Welcome(agent, outbox, server, vigil, peers).met)
        failure = "it could not enter its world"
        try:
            if meeting is not None and comeback:
                await _come_back(place, meeting, members)
            server.open()
            me = Worker(place.name, place.rank, place.world_size, tuple(peers), comeback, vigil)
            log.info("%r: the world is complete", me)
            async with _ended_by_others(place, vigil):
                yield me
            failure = ""
        except BaseException as exc:
            failure = describe(exc)
            raise
        finally:
            await Leaving(
                outbox,
                server,
                vigil,
                agent,
                meeting,
                peers=peers,
                patience=place.stop_timeout,
                failure=failure,
            ).run()
    finally:
        _doors.serve(None)
        _outbox.use(None)


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


# ── joining ─────────────────────────────────────────────────────────────────────────────────────


def _meeting(place: Place) -> Meeting:
    return Meeting(place.init_method, place.seat(), place.start_timeout)


async def _join(place: Place, meeting: Meeting | None) -> tuple[Agent, list[Member]]:
    """Start torch's RPC among the others."""
    agents: list[Agent] = []
    joining = asyncio.ensure_future(
        run_blocking(daemon("aiorpc-join"), lambda: _meet_all(place, meeting, agents))
    )
    try:
        members = await asyncio.shield(joining)
    except BaseException:
        if meeting is not None:
            meeting.leave()
        await asyncio.wait((joining,), timeout=LEAVE)
        joining.cancel()
        if agents:
            await run_blocking(daemon("aiorpc-stop"), agents[0].stop)
        raise
    return agents[0], members


def _meet_all(place: Place, meeting: Meeting | None, agents: list[Agent]) -> list[Member]:
    """Blocks. Leaves the agent in `agents`, also if it raises later."""
    if meeting is None:
        number = keeps_number() or 0
        agents.append(_start(place, number))
        return [Member(place.name, 0, number, agents[0].address)]
    seats = meeting.sign_in()
    number = meeting.number(seats)
    agents.append(_start(place, number))
    meeting.publish(number, agents[0].address)
    members = [
        Member(seat.name, seat.rank, *where, seat.device_maps, seat.comeback * LINKS)
        for seat, where in zip(seats, meeting.places(), strict=True)
    ]
    for member in members:
        agents[0].meet(member)
    return members


async def _come_back(place: Place, meeting: Meeting, members: list[Member]) -> None:
    if await announce(place.name, members):
        return
    meeting.bury()
    raise WorldTimeout(
        f"{place.name!r} came back into a world of which nobody answers. If it has ended, or the "
        f"file at {place.init_method} is of an earlier run, enter again",
        [each.rank for each in members if each.name != place.name],
    )


def _start(place: Place, number: int) -> Agent:
    with loopback() if place.is_local else contextlib.nullcontext():
        return Agent(
            place.name,
            number,
            threads=place.threads,
            transports=place.transports,
            device_maps=place.device_maps,
        )
