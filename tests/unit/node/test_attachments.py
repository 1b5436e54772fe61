"""Calls to a worker of torch's world that is not attached, and to one that cannot attach."""

import asyncio

import pytest

from aiorpc_torch import NotInWorld, WorkerUnreachable
from aiorpc_torch._node.attachments import Attachments, _refusal
from aiorpc_torch._node.config import NodeConfig
from aiorpc_torch._node.node import Node
from aiorpc_torch._peers.peers import Event, Peer, Peers
from tests.support.two_ends import SOON, WORKERS

NOT_THERE = "On WorkerInfo(id=1, name=w):\nModuleNotFoundError(\"No module named 'aiorpc_torch"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (f"{NOT_THERE}'\")", "it does not have aiorpc_torch: install it there"),
        (f"{NOT_THERE}._endpoint'\")", "it has another version of aiorpc_torch"),
        ("AttributeError: no attribute 'attach_message'", "it has another version"),
    ],
)
def test_why_a_worker_cannot_attach(text: str, remedy: str) -> None:
    """Without the package, or with one whose modules and functions have other names."""
    error = _refusal("w", RuntimeError(text))
    assert isinstance(error, WorkerUnreachable)
    assert error.reason.startswith(remedy)


async def attached() -> tuple[Attachments, Peer]:
    """Return the attachments of a worker that leaves, and one of its peers, which serves."""
    node = Node(Peers("far", WORKERS, is_attached=True), NodeConfig())
    assert node.attachments is not None
    peer = node.members.peers["near"]
    node.membership.report(peer, Event.ATTACH, epoch=1)
    node.membership.close()
    await node.server.close(SOON)
    return node.attachments, peer


async def test_a_peer_that_leaves_as_this_process_does() -> None:
    """It has refused a connection: whoever opens it does not ask again, without end."""
    found, peer = await attached()
    with pytest.raises(NotInWorld, match="leaves attach"):
        await found.on_refused(peer, 1)


def test_an_event_loop_that_is_closed() -> None:
    """A call of another one to a peer that is not known to serve ends with the reason."""
    found, peer = asyncio.run(attached())
    with pytest.raises(NotInWorld, match="leaves attach"):
        asyncio.run(found.on_refused(peer, 1))
