"""What a worker says of itself to those it meets, and which number torch gives it. Plain Python."""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Seat:
    """What a worker says of itself when it comes."""

    name: str
    rank: int
    world_size: int
    version: str
    """Of this library: what travels between workers differs between versions."""
    number: int | None = None
    """torch's number of its process, if it has one from an earlier world."""
    devices: int = 0
    """How many CUDA devices its process has."""
    device_maps: dict[str, dict[str, str]] | str = field(default_factory=dict)
    """As it was asked for: "auto", or for each peer its own devices and the peer's."""
    namespace: str = ""
    """Of the network in which it listens."""
    comeback: int = 0
    """How often workers have come back into this world, when this one did; 0: never."""
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)

    def dump(self) -> str:
        """As it is written at the meeting."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> "Seat":
        """As it was written."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return f"{self.name!r} (rank {self.rank}, process {self.pid} on {self.host})"

    def quarrel(self, other: "Seat") -> str:
        """Why these two, of different ranks, are not of one world; "" if they may be."""
        if other.world_size != self.world_size:
            return (
                f"{other} was started with world_size={other.world_size}, "
                f"{self} with world_size={self.world_size}"
            )
        if other.version != self.version:
            return (
                f"{other} runs aiorpc_torch {other.version}, {self} runs {self.version}: "
                "one world takes one version"
            )
        if other.name == self.name and other.rank != self.rank:
            return f"two workers are called {self.name!r}: {other} and {self}"
        return ""


def numbers(seats: Sequence[Seat]) -> list[int]:
    """torch's number of each worker: its rank, or what its process had in an earlier world.

    Everybody finds the same. Of two with one number from before, the lower rank keeps it.
    """
    kept: dict[int, int] = {}
    for seat in seats:
        if seat.number is not None and seat.number not in kept.values():
            kept[seat.rank] = seat.number
    free = [number for number in range(2 * len(seats)) if number not in kept.values()]
    for seat in seats:
        if seat.rank not in kept:
            number = seat.rank if seat.rank in free else free[-1]
            free.remove(number)
            kept[seat.rank] = number
    return [kept[seat.rank] for seat in seats]
