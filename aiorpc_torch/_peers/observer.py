"""The observer of peers, as both ends of a connection see it."""

from typing import Protocol

from ..errors import RpcError
from .peers import Peer


class PeerObserver(Protocol):
    """An observer of peers, told by each end of a connection. Its methods are thread-safe.

    Each end notes the time of a message in the record of the peer.
    """

    def on_message(self, peer: Peer) -> None:
        """Note a message of a peer that is not alive."""

    def on_proof(self, peer: Peer) -> None:
        """Note that a peer whose connection has ended has proven itself at a new socket."""

    def on_disconnect(self, peer: str, worker_id: int, error: RpcError) -> RpcError | None:
        """Handle the end of a connection to that process of `peer` without a leave message.

        Return the error of its calls: `error`, or what the process has told of its failure. None if
        that process has ended or ends now: `ConnectionPool.on_peer_lost` follows with the reason.
        """

    def on_leave_message(self, peer: str, worker_id: int, what: str, text: str) -> None:
        """Handle the leave message of process `worker_id` of `peer`: its kind and its reason.

        "retires": it takes no new calls, and the leave message of its connections follows.
        """

    def penalty(self, peer: str) -> int | None:
        """Return 0 for a live peer, None for a lost one; in between, a load to add."""

    async def wait_until_probed(self, peer: str) -> None:
        """Wait until a peer whose connection has ended has answered or is lost. On any loop."""

    async def wait_until_alive(self, peer: str) -> None:
        """Wait until a lost peer has rejoined. From any loop. Raises WorkerLost if it will not,
        WorkerLeft if it has left in order, NotInWorld once this worker leaves its world.
        """
