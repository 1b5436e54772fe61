"""The members of a world, as its parts read them."""

import pytest

from aiorpc_torch import NotInWorld, WorkerLost
from aiorpc_torch._peers import peers as peers_module
from aiorpc_torch._peers.peers import Duty, Effect, Event, Peer, Peers, State
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._wire.handshake import Party


def members() -> Peers:
    return Peers("a", [PeerInfo("a", 0, 5, ""), PeerInfo("b", 1, 6, "")])


def join(found: Peers, name: str, rank: int) -> Peer:
    """Let a worker enter that was not there from the start."""
    peer = found.admit(PeerInfo(name, rank, 10 * rank, ""))
    found.apply(peer, Event.ENTRY)
    return peer


def end(found: Peers, name: str, event: Event = Event.LOSS) -> list[Effect]:
    """Report the end of a worker; return what the driver has to forget."""
    effects = found.apply(found.peers[name], event, WorkerLost(name, "for this test"))
    return [each for each in effects if each.duty is Duty.FORGET]


@pytest.fixture
def one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the members that are gone, only the last one is known."""
    monkeypatch.setattr(peers_module, "KEPT_GONE", 1)


@pytest.mark.parametrize(
    ("own", "theirs", "endpoint", "found"),
    [
        ("here", "here", "", ""),
        ("here", "there", "", "uv://10.0.0.2:7"),
        ("here", "there", "10.0.0.2:29600", "10.0.0.2:29600"),
        ("", "", "", "uv://10.0.0.2:7"),
    ],
    ids=["same namespace", "another one", "one port", "unknown"],
)
def test_the_address_of_a_peer_elsewhere(own: str, theirs: str, endpoint: str, found: str) -> None:
    """Within one network namespace the address is no reason not to reach a peer."""
    me = PeerInfo("a", 0, 5, "uv://10.0.0.1:7", namespace=own)
    peer = PeerInfo("b", 1, 6, "uv://10.0.0.2:7", namespace=theirs, endpoint=endpoint)
    every = Peers("a", [me, peer])
    assert every.address_elsewhere(every.peers["b"]) == found


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


def test_a_name_that_is_unknown() -> None:
    found = members()
    assert found.worker_id_of("c") is None
    assert not found.is_here("c")


def test_the_peers_that_are_present() -> None:
    """In rank order: from its entry until it has left, also while it is lost."""
    found = Peers("a", [PeerInfo("a", 1, 5, ""), PeerInfo("c", 2, 6, ""), PeerInfo("b", 0, 7, "")])
    assert found.present() == ("b", "c")
    late = found.admit(PeerInfo("late", 3, 8, ""))
    assert not found.is_here("late")
    end(found, "c")
    assert found.present() == ("b", "c")
    found.apply(late, Event.ENTRY)
    end(found, "b", Event.LEAVE)
    assert found.present() == ("c", "late")
    assert [found.is_here(name) for name in ("b", "c", "late")] == [False, True, True]


def test_the_device_maps_of_each_worker() -> None:
    """As it has told them when it entered."""
    maps = {"a": {"cuda:0": "cuda:1"}}
    found = Peers("a", [PeerInfo("a", 0, 5, ""), PeerInfo("b", 1, 6, "", maps)])
    assert found.device_maps() == {"a": {}, "b": maps}


def test_what_a_process_has_told_is_not_of_the_next_one() -> None:
    """Of a process that replaces another, nothing is known."""
    found = members()
    old = found.peers["b"]
    old.is_done_there, old.loss_there, old.is_open = True, "frozen", False
    found.apply(old, Event.CUT)
    found.replace(PeerInfo("b", 1, 7, ""))
    new = found.peers["b"]
    assert (new.is_done_there, new.loss_there, new.is_open) == (False, "", True)
    assert (new.is_probed, new.is_pinged, new.is_exiting) == (False, False, False)
    assert (new.introduction, new.credentials, new.refusal) == (None, None, None)


# ── who is forgotten ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("one_is_kept")
def test_a_member_that_came_later_is_forgotten() -> None:
    """By name and by rank, unless another one has its rank by then."""
    found = members()
    for rank, name in enumerate("cde", 2):
        join(found, name, rank)
    forgotten = found.peers["c"], found.peers["d"]
    assert end(found, "c") == []
    assert end(found, "d") == [Effect(Duty.FORGET, forgotten[0])]
    assert [*found.workers] == ["a", 0, "b", 1, "d", 3, "e", 4]
    other = join(found, "f", 3)
    assert end(found, "e") == [Effect(Duty.FORGET, forgotten[1])]
    assert "d" not in found.workers
    assert found.workers[3] is other


@pytest.mark.usefixtures("one_is_kept")
def test_the_first_members_are_not_forgotten() -> None:
    """Another process may replace one, which may never enter."""
    found = Peers("a")
    for rank, name in enumerate("ab"):
        found.admit(PeerInfo(name, rank, rank, ""), is_first=True, is_known=True)
    for rank, name in enumerate("cdef", 2):
        join(found, name, rank)
    for name in "bcd":
        end(found, name)
    found.replace(PeerInfo("b", 1, 9, ""))
    for name in "ef":
        end(found, name)
    assert [*found.peers] == ["b", "f"]


@pytest.mark.usefixtures("one_is_kept")
def test_a_replacement_that_never_enters_is_forgotten() -> None:
    """If its worker came later."""
    found = members()
    join(found, "c", 2)
    join(found, "d", 3)
    found.replace(PeerInfo("c", 2, 21, ""))
    replacement = found.peers["c"]
    assert end(found, "d") == [Effect(Duty.FORGET, replacement)]
    assert [*found.peers] == ["b", "d"]


@pytest.mark.usefixtures("one_is_kept")
def test_a_member_that_is_alive_again_is_not_forgotten() -> None:
    """It has answered, or another process has taken its place."""
    found = members()
    for rank, name in enumerate("cde", 2):
        join(found, name, rank)
    end(found, "c")
    found.apply(found.peers["c"], Event.MESSAGE)
    end(found, "d")
    found.replace(PeerInfo("d", 3, 31, ""))
    found.apply(found.peers["d"], Event.ENTRY)
    assert end(found, "e") == []
    assert [*found.peers] == ["b", "c", "d", "e"]


@pytest.mark.usefixtures("one_is_kept")
def test_each_end_counts_once() -> None:
    """However often it is reported, and whatever others send meanwhile."""
    found = members()
    join(found, "c", 2)
    join(found, "d", 3)
    for _ in range(3):
        assert end(found, "c") == []
        assert found.apply(found.peers["d"], Event.MESSAGE) == []
    assert [*found.peers] == ["b", "c", "d"]


@pytest.mark.usefixtures("one_is_kept")
def test_who_leaves_the_group_of_torch_is_forgotten() -> None:
    """One that is lost may attach again."""
    infos = [PeerInfo(name, rank, rank, "") for rank, name in enumerate("abcd")]
    found = Peers("a", infos, is_attached=True)
    left = found.peers["b"]
    for name in "cd":
        assert end(found, name) == []
    assert end(found, "b", Event.LEAVE_GROUP) == []
    found.apply(found.peers["c"], Event.MESSAGE)
    assert [*found.peers] == ["b", "c", "d"]
    assert end(found, "c", Event.LEAVE_GROUP) == [Effect(Duty.FORGET, left)]
