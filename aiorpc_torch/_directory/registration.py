"""The registration of a worker at the directory, and torch's worker ids. Imports no torch."""

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from .._text import printable, printable_parts

MAX_PROCESSES = 1 << 15  # of a world in its life: torch's worker ids have 16 bits, with a sign

_NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")
_TEXTS = ("version", "device_maps", "namespace", "endpoint", "host")


def check_worker_name(name: str) -> None:
    """Raise ValueError for a name that torch does not take."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            "a worker's name must be 1 to 127 letters, digits, '-', '_' or ':', "
            f"got '{printable(name, 200)}'"
        )


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker's description of itself. Raises ValueError for an invalid name."""

    name: str
    rank: int
    world_size: int
    version: str  # version of this library: what travels between workers differs between versions
    worker_id: int | None = None  # torch's worker id of the process, None in its first world
    devices: int = 0  # number of CUDA devices of the process
    # As requested: "auto", or for each peer a map from own devices to the peer's.
    device_maps: dict[str, dict[str, str]] | str = field(default_factory=dict)
    namespace: str = ""  # network namespace in which the worker listens
    endpoint: str = ""  # address and port for other hosts, "" unless each worker has one port
    is_secure: bool = False  # whether it uses TLS
    restarts: int = 0  # number of processes that were in the world under this name before
    joined: bool = False  # entered the running world under a new rank; its size is the start's
    entry: int = 0  # number of rejoins and joins up to this one's, 0 if it was there from the start
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)

    def __post_init__(self) -> None:
        check_worker_name(self.name)
        for each in _TEXTS:  # a worker of a large world reads thousands: none is set in vain
            if (shown := printable_parts(found := getattr(self, each))) != found:
                object.__setattr__(self, each, shown)

    def __str__(self) -> str:
        rank = f"rank {self.rank}, " if self.rank >= 0 else ""  # none before it has joined
        return f"{self.name!r} ({rank}process {self.pid} on {self.host})"

    def conflict_with(self, other: "Registration") -> str:
        """Return why `other` cannot be in the same world, "" if it can."""
        if other.world_size != self.world_size and not other.joined:
            return (
                f"world_size must be the same in every worker: {other} was started with "
                f"world_size={other.world_size}, {self} with world_size={self.world_size}"
            )
        if other.version != self.version:
            return (
                f"every worker must run the same version: {other} runs aiorpc_torch "
                f"{other.version}, {self} runs {self.version}"
            )
        for option, mine, theirs in (
            ("tls=", self.is_secure, other.is_secure),
            ("port=", bool(self.endpoint), bool(other.endpoint)),
        ):
            if mine != theirs:
                has, lacks = (self, other) if mine else (other, self)
                rule = f"every worker must be given {option}, or none"
                return f"{rule}: {has} has it, {lacks} has not"
        if other.name == self.name and other.rank != self.rank and not other.joined:
            return f"two workers have the name {self.name!r}: {other} and {self}"
        return ""


def assign_worker_ids(registrations: Sequence[Registration]) -> list[int]:
    """Return torch's worker id of each worker: its process's id, by default its rank.

    Every worker computes the same ids. If two processes have one id, the lower rank keeps it.
    """
    kept: dict[int, int] = {}  # ranks by the ids of their processes
    for each in registrations:
        if each.worker_id is not None:
            kept.setdefault(each.worker_id, each.rank)
    ids = {rank: worker_id for worker_id, rank in kept.items()}
    free = dict.fromkeys(each for each in range(2 * len(registrations)) if each not in kept)
    for each in registrations:
        if each.rank in ids:
            continue
        if each.rank in free:
            del free[each.rank]
            ids[each.rank] = each.rank
        else:
            ids[each.rank], _ = free.popitem()  # the highest
    return [ids[each.rank] for each in registrations]
