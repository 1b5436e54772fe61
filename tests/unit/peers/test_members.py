"""The members of a world, as its parts read them."""

import pytest

from aiorpc_torch import NotInWorld, WorkerLost
from aiorpc_torch._peers.peers import Event, Peers, State
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire.handshake import Party


def members() -> Peers:
    return Peers("a", [PeerInfo("a", 0, 5, ""), PeerInfo("b", 1, 6, "")])


def test_members_by_name_and_by_rank() -> None:
    """A worker is no peer of itself."""
    found = members()
    assert found.workers["b"] is found.workers[1] is found.peers["b"]
    assert (found.me, [*found.peers], found.names()) == (Party("a", 5), ["b"], ["a", "b"])


def test_a_process_that_was_replaced() -> None:
    """It is refused, and what it told counts no more; who holds a table sees the new one."""
    found = members()
    peers, old = found.peers, found.peers["b"]
    found.apply(old, Event.FAILURE, WorkerLost("b", "its block raised"))
    found.check(Party("b", 6))
    found.replace(PeerInfo("b", 1, 7, ""))
    with pytest.raises(NotInWorld, match="worker 'b' was restarted"):
        found.check(Party("b", 6))
    found.check(Party("b", 7))
    assert (peers["b"].worker_id, found.worker_id_of("b"), found.workers[1].worker_id) == (7, 7, 7)
    assert found.told() == {}
    assert found.get("b", 6) is None
    assert found.get("b", 7) is peers["b"]
    assert peers["b"].state is State.LOST, "until it has entered"


def test_a_worker_that_joins_under_a_name_again() -> None:
    """Its old rank is of no member; its name has the new one."""
    found = members()
    found.replace(PeerInfo("b", 4, 9, ""))
    assert found.workers["b"] is found.workers[4]
    assert 1 not in found.workers


def test_a_stranger() -> None:
    with pytest.raises(ValueError, match="no worker 'c' in this world"):
        members().check(Party("c", 6))
