"""The members of a world, as its parts read them."""

import pytest

from aiorpc_torch import NotInWorld
from aiorpc_torch._protocol.members import Members
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire.handshake import Party


def members() -> Members:
    return Members("a", [PeerInfo("a", 0, 5, ""), PeerInfo("b", 1, 6, "")])


def test_members_by_name_and_by_rank() -> None:
    """A worker is no peer of itself."""
    found = members()
    assert found.workers["b"] is found.workers[1] is found.peers["b"]
    assert (found.me, [*found.peers]) == (Party("a", 5), ["b"])


def test_a_process_that_was_replaced() -> None:
    """It is refused, and what it told counts no more; who holds a table sees the new one."""
    found = members()
    peers, processes = found.peers, found.processes
    found.leave_messages["b"] = "its block raised"
    found.check(Party("b", 6))
    found.put(PeerInfo("b", 1, 7, ""))
    with pytest.raises(NotInWorld, match="worker 'b' was restarted"):
        found.check(Party("b", 6))
    found.check(Party("b", 7))
    assert (peers["b"].number, processes["b"], found.workers[1].number) == (7, 7, 7)
    assert not found.leave_messages


def test_a_worker_that_joins_under_a_name_again() -> None:
    """Its old rank is of no member; its name has the new one."""
    found = members()
    found.put(PeerInfo("b", 4, 9, ""))
    assert found.workers["b"] is found.workers[4]
    assert 1 not in found.workers


def test_a_stranger() -> None:
    with pytest.raises(ValueError, match="no worker 'c' in this world"):
        members().check(Party("c", 6))
