"""What is known of a peer's attachment does not depend on the order of its messages."""

import threading

from hypothesis import given, strategies as st

from aiorpc_torch._world.attachments import PeerState
from aiorpc_torch.errors import NotInWorld

messages = st.lists(
    st.integers(0, 5).flatmap(
        lambda epoch: st.tuples(st.just(epoch), st.booleans() if epoch else st.just(False))
    ),
    min_size=1,
)


@given(messages)
def test_the_latest_message_counts(told: list[tuple[int, bool]]) -> None:
    """In each epoch a process attaches first, then leaves."""
    state = PeerState()
    for epoch, is_attached in told:
        state.record(epoch, is_attached)
    epoch, has_left = max((epoch, not is_attached) for epoch, is_attached in told)
    assert (state.epoch, state.is_attached) == (epoch, not has_left)
    assert state.has_left == (epoch > 0 and has_left)
    assert state.is_known


@given(messages)
def test_a_change_wakes_who_waits(told: list[tuple[int, bool]]) -> None:
    """No message that changes the state leaves a waiter behind."""
    state = PeerState()
    for epoch, is_attached in told:
        before, changed = (state.epoch, state.is_attached), state.changed
        is_new = state.record(epoch, is_attached)
        assert is_new == ((state.epoch, state.is_attached) != before)
        assert changed.done() or not is_new


def test_a_peer_that_cannot_attach_has_left_until_it_does() -> None:
    state = PeerState()
    state.refuse(lambda: NotInWorld("no package"))
    assert (state.has_left, state.is_attached) == (True, False)
    waiting = state.changed
    state.record(1, True)
    assert waiting.done()
    assert (state.has_left, state.refusal) == (False, None)


def test_changes_in_many_threads() -> None:
    """Each waiter is woken once, whichever thread records."""
    state = PeerState()
    threads = [
        threading.Thread(target=state.record, args=(epoch, bool(epoch % 2)))
        for epoch in range(1, 20)
    ]
    first = state.changed
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert first.done()
    assert state.epoch == 19
