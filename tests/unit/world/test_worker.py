"""How a worker serves until a peer has left."""

import pytest

from aiorpc_torch import WorkerLost
from aiorpc_torch._protocol.members import Members
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._world.config import NodeConfig
from aiorpc_torch._world.node import Node
from aiorpc_torch.types import Worker


def worker(told: dict[str, str]) -> Worker:
    """Worker a, whose peer b has told this as it left; its detector counts b as alive."""
    members = Members("a", [PeerInfo("a", 0, 0, ""), PeerInfo("b", 1, 1, "")])
    members.leave_messages.update(told)
    return Worker._of(Node(members, NodeConfig()))


async def test_serve_returns_when_the_peer_has_left() -> None:
    """In order."""
    await worker({"b": ""}).serve("b")


async def test_a_peer_that_failed_is_lost() -> None:
    """Also if a late answer to a ping has made it count as alive again."""
    with pytest.raises(WorkerLost, match=r"'b' is lost: its block raised ValueError: x$"):
        await worker({"b": "its block raised ValueError: x\nTraceback"}).serve("b")
