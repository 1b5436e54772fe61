"""What a callee knows of its peers: watches end with a goodbye, whichever comes first."""

from hypothesis import given
from hypothesis import strategies as st

from aiorpc_torch._peers import Peers

NAMES = ("ps", "trainer0", "trainer1")
STEPS = st.tuples(st.sampled_from(["watch", "goodbye", "return", "leave"]), st.sampled_from(NAMES))


@given(st.lists(STEPS))
def test_a_watch_is_open_while_both_are_there(steps: list[tuple[str, str]]) -> None:
    """One that stayed open longer would keep its sender's torch from ending in order."""
    peers, gone, has_left = Peers(), set(), False
    watches = []
    for step, name in steps:
        if step == "watch":
            watches.append((name, peers.watched(name.encode())))
        elif step == "goodbye":
            peers.part(name, "")
            peers.release(name)
            gone.add(name)
        elif step == "return":
            peers.release(name)
            peers.replace(name, 1)
            watches = [each for each in watches if each[0] != name]
            gone.discard(name)
        else:
            peers.release()
            has_left = True
        for peer, watch in watches:
            assert watch.done() == (has_left or peer in gone)
        watches = [each for each in watches if not each[1].done()]
