"""The log of changes: each follows from the last one of its worker, and no reader misses one."""

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._world.changes import Change, ChangeLog, Entry, Kind

PRESENT = {"joined", "returned", "lost"}

kinds: st.SearchStrategy[Kind] = st.sampled_from(["joined", "left", "lost", "returned"])
told = st.lists(st.tuples(kinds, st.sampled_from("abc")))


def read(entry: Entry) -> list[Change]:
    """Return the changes after an entry."""
    found = []
    while (following := entry.next) is not None:
        found.append(following.change)
        entry = following
    return found


@pytest.mark.promise("rejoin.changes")
@given(told)
def test_a_reader_that_applies_the_changes_knows_the_members(
    messages: list[tuple[Kind, str]],
) -> None:
    """However often each source tells, and in whatever order."""
    log = ChangeLog()
    log.admit("a")
    start, alive = log.end, {"a"}
    members = {"a"}
    for kind, name in messages:
        log.record(Change(kind, name, 0))
    for change in read(start):
        if change.kind in ("joined", "returned"):
            assert change.name not in alive
            alive.add(change.name)
        elif change.kind == "lost":
            assert change.name in alive
        members = members - {change.name} if change.kind == "left" else members | {change.name}
        if change.kind in ("left", "lost"):
            alive -= {change.name}
    assert {name for name in "abc" if log.has(name)} == members


@given(told)
def test_a_message_that_is_repeated_changes_nothing(messages: list[tuple[Kind, str]]) -> None:
    """What is told twice in a row is logged once."""
    once, twice = ChangeLog(), ChangeLog()
    starts = once.end, twice.end
    for kind, name in messages:
        once.record(Change(kind, name, 0))
        twice.record(Change(kind, name, 0))
        assert not twice.record(Change(kind, name, 0))
    assert read(starts[0]) == read(starts[1])


@given(told, st.integers(0, 20))
def test_a_reader_gets_all_that_follows_its_first_step(
    messages: list[tuple[Kind, str]], begin: int
) -> None:
    """Whenever it begins, and however late it reads."""
    log, starts, logged = ChangeLog(), [], []
    for number, (kind, name) in enumerate(messages):
        if number == begin:
            starts.append((log.end, len(logged)))
        change = Change(kind, name, number)
        if log.record(change):
            logged.append(change)
    for entry, since in starts:
        assert read(entry) == logged[since:]


def test_nothing_is_recorded_after_the_end() -> None:
    """This worker has left; what was recorded before can be read."""
    log = ChangeLog()
    log.admit("a")
    start = log.end
    assert log.record(Change("lost", "a", 1, "for this test"))
    log.close()
    assert not log.record(Change("returned", "a", 1))
    assert read(start) == [Change("lost", "a", 1, "for this test")]
