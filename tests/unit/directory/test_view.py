"""The world as a member knows it from the directory."""

from aiorpc_torch._directory.directory_messages import Add, Left, Member, Members
from aiorpc_torch._directory.succession import MAX_LEAVING, View
from tests.support.directories import registration


def member(number: int) -> Member:
    own = registration(number, -1, name=f"a{number}", joined=True, entry=number)
    return Member(own, number, f"at {number}", {}, "")


def test_members_that_have_left_are_forgotten() -> None:
    """The numbers that they had are not: no other process gets them."""
    view = View()
    view.hear(Members([member(0)]))
    for number in range(1, 3 * MAX_LEAVING + 1):
        view.hear(Add(member(number)))
        view.hear(Left(f"a{number}", number))
    known = view.known(lost=[])
    assert len(known.leaving) == MAX_LEAVING
    assert {each.name for each in known.members} == {"a0", *known.leaving}
    assert known.leaving[-1] == f"a{3 * MAX_LEAVING}"
    assert known.entries == 3 * MAX_LEAVING
