"""The members of a world and all connections of its directory: a table that its parts share."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from .._port.network import is_loopback_host
from . import directory_messages as wire
from .directory_messages import ToWorker
from .registration import Registration


class Connections(Protocol):
    """The connections of the workers, by number."""

    def send(self, connections: Iterable[int], message: ToWorker) -> None:
        """Send a message to each of them that is open."""

    def close_connection(self, connection: int) -> None:
        """Close a connection; `gone` is not called for it."""

    def call_later(self, seconds: float, step: Callable[[], None]) -> None:
        """Call `step` after that time."""

    def record(self, step: Callable[[], None]) -> None:
        """Write `numbers` at the place, then call `step`: not if another directory is there."""


@dataclass(eq=False, slots=True)
class Process:
    """A process that has registered, or that another directory has known."""

    registration: Registration
    digest: str  # of its key
    worker_id: int = -1
    connection: int = -1
    is_open: bool = False  # whether the connection is open
    member: wire.Member | None = None  # as others reach it, once it has an address
    loopback: str = ""  # its host, if that is of the loopback interface
    is_retiring: bool = False  # whether its block has ended, and it takes no new calls
    has_left: bool = False
    is_lost: bool = False  # for the member that told of it, when the directory moved
    is_doubtful: bool = False  # whether it is not known yet if the holder of its name is alive
    judges: set[int] = field(default_factory=set)  # connections of members asked about the holder
    unaware: set[int] = field(default_factory=set)  # those of members that have not added it yet
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.registration.name  # a name stays, unlike the rank

    @property
    def rank(self) -> int:
        return self.registration.rank

    def publish(self, address: str, device_maps: dict[str, dict[str, str]]) -> wire.Member:
        """Note how others reach it; return that."""
        own, host = self.registration, urlsplit(address).hostname or ""
        self.loopback = host if is_loopback_host(host) and not own.endpoint else ""
        self.member = wire.Member(own, self.worker_id, address, device_maps, self.digest)
        return self.member

    def hidden_from(self, namespace: str) -> str:
        """Return why one in that network namespace does not reach it, "" if it may."""
        own = self.registration.namespace
        if not (self.loopback and namespace and own) or namespace == own:
            return ""
        return (
            f"worker {self.name!r} listens at {self.loopback} only, and a process that enters is "
            "on another host or in another container. Give the first workers and that process the "
            "interface= (or AIORPC_INTERFACE) at which the others reach them"
        )


class Members:
    """The members of a world, and all open connections; `keeper` keeps the directory."""

    def __init__(self, connections: Connections, keeper: str, world: str) -> None:
        self.connections, self.keeper, self.world = connections, keeper, world
        self.named: dict[str, Process] = {}  # of each name the last process
        self.open: dict[int, Process] = {}  # by connection, also those that are no members
        self._by_rank: list[Process] = []  # empty after a change

    def has(self, process: Process) -> bool:
        return self.named.get(process.name) is process

    def holds(self, process: Process) -> bool:
        """Return whether that process is a member, perhaps from before it connected again."""
        held = self.named.get(process.name)
        return held is not None and held.worker_id == process.worker_id

    def by_rank(self) -> Sequence[Process]:
        """Return the members in rank order: they are sorted once for each change."""
        if not self._by_rank:
            self._by_rank = sorted(self.named.values(), key=lambda each: each.rank)
        return self._by_rank

    def here(self) -> list[Process]:
        """Return the members that are connected."""
        return [each for each in self.named.values() if each.is_open]

    def add(self, process: Process) -> None:
        """Add a member in place of the one of its name."""
        self.named[process.name], self._by_rank = process, []

    def remove(self, process: Process) -> None:
        del self.named[process.name]
        self._by_rank = []

    def connect(self, process: Process, connection: int) -> None:
        """Note the open connection of a process."""
        process.connection, process.is_open = connection, True
        self.open[connection] = process

    def disconnect(self, process: Process) -> bool:
        """Close the connection of a process; return whether it was open."""
        if self.open.pop(process.connection, None) is None:
            return False
        process.is_open = False
        self.connections.close_connection(process.connection)
        return True

    def send(self, processes: Iterable[Process], message: ToWorker) -> None:
        """Send a message to those processes that are connected."""
        self.connections.send([each.connection for each in processes if each.is_open], message)

    def send_all(self, message: ToWorker) -> None:
        """Send a message to all members that are connected."""
        self.send(self.named.values(), message)

    def send_list(self, processes: Sequence[Process], but: Sequence[Process] = ()) -> None:
        """Send the members, without some of them: only their names."""
        names = {each: each.name for each in but}
        rest = (each.member for each in self.by_rank() if each not in names)
        listed = [member for member in rest if member is not None]
        self.send(processes, wire.Members(listed, [*names.values()], self.keeper))

    def send_ends(self, processes: Sequence[Process]) -> None:
        """Send which members leave or are in doubt."""
        for each in self.named.values():
            if each.is_retiring:
                self.send(processes, wire.Left(each.name, each.worker_id))
            if not (each.is_open or each.has_left):
                self.send(processes, wire.Gone(each.name, each.worker_id))


def digest(key: str) -> str:
    """Return the digest of a key, "" for none."""
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
