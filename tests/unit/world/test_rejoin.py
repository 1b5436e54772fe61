"""Entries into a running world, as a peer answers them."""

from typing import Any

import pytest

from aiorpc_torch._protocol.members import Members
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._world.rejoin import EntryHandler, Step

B = PeerInfo("b", 1, 1, "")


def handler() -> tuple[EntryHandler, list[tuple[str, str, int]]]:
    """Return the handler of worker a, and what it does."""
    members, done = Members("a", [PeerInfo("a", 0, 0, ""), B]), list[tuple[str, str, int]]()

    def add(member: PeerInfo) -> None:
        members.put(member)
        done.append(("add", member.name, member.number))

    def announce(member: PeerInfo) -> None:
        done.append(("announce", member.name, member.number))

    return EntryHandler(members, add, announce), done


async def test_a_worker_that_joins_is_added_and_then_announced() -> None:
    """Whichever of the steps comes first, and once, though a message is repeated."""
    found, done = handler()
    c, d = PeerInfo("c", 2, 2, ""), PeerInfo("d", 3, 3, "")
    steps: list[tuple[Step, PeerInfo]] = [("ask", c), ("add", c), ("add", c), ("announce", c)]
    for step, member in (*steps, ("announce", d)):
        assert await found._take(step, member) == ""
    names = [(what, name) for what, name, _ in done]
    assert names == [("add", "c"), ("announce", "c"), ("add", "d"), ("announce", "d")]


async def test_a_replacement_process_takes_one_step() -> None:
    found, done = handler()
    assert await found._take("replace", PeerInfo("b", 1, 5, "")) == ""
    assert done == [("add", "b", 5), ("announce", "b", 5)]


@pytest.mark.promise("joining.names")
async def test_names_that_are_refused() -> None:
    """This worker's own, and that of a process which entered later. One that leaves is no more."""
    found, done = handler()
    own: Any = PeerInfo("a", 7, 7, "")
    assert await found._take("ask", own) == "two workers are called 'a': the first one is alive"
    found.members.put(PeerInfo("b", 4, 9, ""))
    late = PeerInfo("b", 3, 8, "")
    for step in ("add", "announce"):
        assert "two workers are called 'b'" in await found._take(step, late)
    assert not done
    found.members.leave_messages["b"] = ""
    assert await found._take("ask", PeerInfo("b", 5, 10, "")) == ""
