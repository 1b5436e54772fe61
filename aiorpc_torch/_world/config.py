"""Which worker of which world to be, and what one gets who is it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .._protocol.handshake import network_namespace
from .._server.exports import Export
from .._torch.agent import keeps_number
from .._torch.devices import DeviceMaps, how_many, named
from .._version import __version__
from ..errors import WorkerLost
from .failure_detector import Vigil
from .network import Choice
from .registration import Seat

__all__ = ("Worker",)

OnFailure = Literal["continue", "stop"]


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
    interfaces: Choice = field(default_factory=dict)
    on_failure: OnFailure = "continue"
    exports: tuple[Export, ...] | None = None
    freeze_gc: bool = True
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
        named(self.device_maps)

    def seat(self) -> Seat:
        """What this worker says of itself to the others."""
        return Seat(
            self.name,
            self.rank,
            self.world_size,
            __version__,
            keeps_number(),
            how_many(),
            named(self.device_maps),
            network_namespace(),
        )
