"""The members of one world, as this process knows them."""

from collections.abc import Iterable

from .._torch.agent import PeerInfo
from .._torch.devices import NamedDeviceMaps
from .._wire.handshake import Party
from ..errors import NotInWorld, RpcError


def replaced_text(worker: str) -> str:
    """Return the error text for a process that was replaced."""
    return f"worker {worker!r} was restarted: a newer process has replaced this one"


def left_text(worker: str) -> str:
    """Return the error text for a worker whose block has ended in order."""
    return f"worker {worker!r} has left its world"


def reason_of(error: RpcError) -> str:
    """Return in one line why a peer is lost."""
    return getattr(error, "reason", str(error))


class Members:
    """The members of one world with their current processes, and what is known of them.

    The parts of a node share it. It is empty until the world is complete. The node's loop changes
    it; any thread may read it.

    Attributes:
        name: this worker.
        workers: all members by name, and by rank.
        peers: the other members by name, in rank order.
        processes: process number of each member, by name.
        leave_messages: of each peer that has told of its end: its failure, or "".
        lost_peers: the lost peers, with the reasons.
        last_heard: time of the last message from each peer, which its connections write.
    """

    def __init__(self, name: str, workers: Iterable[PeerInfo] = ()) -> None:
        self.name = name
        self.workers: dict[str | int, PeerInfo] = {}
        self.peers: dict[str, PeerInfo] = {}
        self.processes: dict[str, int] = {}
        self.leave_messages: dict[str, str] = {}
        self.lost_peers: dict[str, RpcError] = {}
        self.last_heard: dict[str, float] = {}
        for worker in workers:
            self.put(worker)

    @property
    def me(self) -> Party:
        """Return this process."""
        return Party(self.name, self.processes[self.name])

    def device_maps(self) -> dict[str, NamedDeviceMaps]:
        """Return the device maps of each member."""
        return {name: self.workers[name].device_maps for name in self.processes}

    def put(self, worker: PeerInfo) -> None:
        """Add a member, or replace its process, whose leave message is dropped."""
        known = self.workers.get(worker.name)
        if known is not None and known.rank != worker.rank:  # it has joined under the name again
            del self.workers[known.rank]
        self.workers[worker.name] = self.workers[worker.rank] = worker
        self.processes[worker.name] = worker.number
        self.leave_messages.pop(worker.name, None)
        if worker.name != self.name:
            self.peers[worker.name] = worker

    def remove(self, worker: PeerInfo) -> None:
        """Forget a member, and all that is known of it."""
        del self.workers[worker.name]
        if (same_rank := self.workers.get(worker.rank)) and same_rank.name == worker.name:
            del self.workers[worker.rank]
        self.peers.pop(worker.name, None)
        self.processes.pop(worker.name, None)
        self.leave_messages.pop(worker.name, None)
        self.lost_peers.pop(worker.name, None)
        self.last_heard.pop(worker.name, None)

    def is_current(self, name: str, number: int) -> bool:
        """Return whether a member's current process has that number."""
        return self.processes.get(name) == number

    def check(self, caller: Party) -> None:
        """Check that a caller is a current member.

        Raises:
            ValueError: if no member has that name.
            NotInWorld: if another process has replaced the caller.
        """
        if caller.name not in self.processes:
            raise ValueError(f"no worker {caller.name!r} in this world")
        if not self.is_current(caller.name, caller.number):
            raise NotInWorld(replaced_text(caller.name))
