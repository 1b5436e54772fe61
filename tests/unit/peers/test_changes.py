"""The log of changes: each follows from the last one of its worker, and no reader misses one."""

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._peers.changes import Change, ChangeLog, Entry, Kind
from aiorpc_torch._peers.peers import Event, Peers
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch.errors import WorkerLost

PRESENT = {"joined", "returned", "lost"}

EVENTS: dict[Kind, Event] = {
    "joined": Event.ENTRY,
    "left": Event.LEAVE,
    "lost": Event.LOSS,
    "returned": Event.MESSAGE,
}

kinds: st.SearchStrategy[Kind] = st.sampled_from(["joined", "left", "lost", "returned"])
told = st.lists(st.tuples(kinds, st.sampled_from("abc")))


def read(entry: Entry) -> list[Change]:
    """Return the changes after an entry."""
    found = []
    while (following := entry.next) is not None:
        found.append(following.change)
        entry = following
    return found


class Told:
    """The peers of a worker, and the log of what is told of them. Of these, `a` is there first."""

    def __init__(self) -> None:
        self.peers, self.log = Peers("me", [PeerInfo("a", 1, 1, "")]), ChangeLog()
        for name in "bc":
            self.peers.admit(PeerInfo(name, 2, 2, ""))

    def tell(self, kind: Kind, name: str) -> list[Change]:
        """Report what makes a change; return what is logged."""
        peer = self.peers.peers[name]
        effects = []
        if kind == "joined" and peer.has_left:
            effects = self.peers.replace(PeerInfo(name, peer.rank, peer.worker_id + 10, ""))
        peer, reason = self.peers.peers[name], WorkerLost(name, "for this test")
        effects += self.peers.apply(peer, EVENTS[kind], reason)
        logged = [each.change for each in effects if each.change is not None]
        for each in logged:
            self.log.record(each)
        return logged


@pytest.mark.promise("rejoin.changes")
@given(told)
def test_a_reader_that_applies_the_changes_knows_the_members(
    messages: list[tuple[Kind, str]],
) -> None:
    """However often each source tells, and in whatever order."""
    world = Told()
    start, alive = world.log.end, {"a"}
    members = {"a"}
    for kind, name in messages:
        world.tell(kind, name)
    for change in read(start):
        if change.kind in ("joined", "returned"):
            assert change.name not in alive
            alive.add(change.name)
        elif change.kind == "lost":
            assert change.name in alive
        members = members - {change.name} if change.kind == "left" else members | {change.name}
        if change.kind in ("left", "lost"):
            alive -= {change.name}
    assert {name for name in "abc" if world.peers.peers[name].is_here} == members


@given(told)
def test_a_message_that_is_repeated_changes_nothing(messages: list[tuple[Kind, str]]) -> None:
    """What is told twice in a row is logged once."""
    once, twice = Told(), Told()
    starts = once.log.end, twice.log.end
    for kind, name in messages:
        once.tell(kind, name)
        twice.tell(kind, name)
        assert twice.tell(kind, name) == []
    assert read(starts[0]) == read(starts[1])


@given(told, st.integers(0, 20))
def test_a_reader_gets_all_that_follows_its_first_step(
    messages: list[tuple[Kind, str]], begin: int
) -> None:
    """Whenever it begins, and however late it reads."""
    world, starts, logged = Told(), [], []
    for number, (kind, name) in enumerate(messages):
        if number == begin:
            starts.append((world.log.end, len(logged)))
        logged += world.tell(kind, name)
    for entry, since in starts:
        assert read(entry) == logged[since:]


def test_nothing_is_recorded_after_the_end() -> None:
    """This worker has left; what was recorded before can be read."""
    log = ChangeLog()
    start = log.end
    log.record(Change("lost", "a", 1, "for this test"))
    log.is_closed = True
    log.record(Change("returned", "a", 1))
    assert read(start) == [Change("lost", "a", 1, "for this test")]
