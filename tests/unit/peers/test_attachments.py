"""The peers of a world that `init_rpc` has started: who serves, in every order of reports."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch import NotInWorld, WorkerLeft, WorkerUnreachable
from aiorpc_torch._peers.changes import Change
from aiorpc_torch._peers.peers import Attachment, Duty, Event, Peer, Peers, State
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch.errors import WorkerLost

UNKNOWN, ATTACHED, DETACHED, REFUSED = Attachment
ATTACHMENTS = (Event.ATTACH, Event.DETACH, Event.REFUSE)


class Report(NamedTuple):
    event: Event
    epoch: int = 0


REPORTS = [
    *(Report(event) for event in (Event.MESSAGE, Event.CUT, Event.LOSS, Event.REFUSE)),
    Report(Event.LEAVE_GROUP),
    Report(Event.DETACH, 0),
    *(Report(event, epoch) for epoch in (1, 2) for event in (Event.ATTACH, Event.DETACH)),
]


def group() -> tuple[Peers, Peer]:
    """Return the workers of torch's group, and one of them, which has not answered yet."""
    infos = [PeerInfo(name, number, number, "") for number, name in enumerate(("me", "p"))]
    found = Peers("me", infos, is_attached=True)
    return found, found.peers["p"]


def expected(reports: Sequence[Report]) -> tuple[bool, bool, Attachment]:
    """Return what is promised after these reports: has it left, is it lost, does it serve.

    The latest that a process has told counts, however late an earlier message is read. Calls are
    refused from a refusal, unless it serves, to the next that it tells. A loss ends with a sign of
    life.
    """
    is_lost, attachment, latest = False, UNKNOWN, (0, True)
    for event, epoch in reports:
        if event is Event.LEAVE_GROUP:
            return True, True, attachment
        if event is Event.REFUSE and attachment is not ATTACHED:
            attachment = REFUSED
        elif event in (Event.ATTACH, Event.DETACH):
            told = (epoch, event is Event.DETACH)
            is_lost = is_lost and (event is Event.DETACH or told <= latest)
            latest = max(told, latest)
            attachment = DETACHED if latest[1] else ATTACHED
        is_lost = (is_lost or event is Event.LOSS) and event is not Event.MESSAGE
    return False, is_lost, attachment


def check_order(reports: Sequence[Report]) -> None:
    found, peer = group()
    told: list[Change] = []
    for event, epoch in reports:
        for each in found.apply(peer, event, WorkerLost("p", "for this test"), epoch):
            told += [] if each.change is None else [each.change]
    has_left, is_lost, attachment = expected(reports)
    assert (peer.has_left, peer.is_lost, peer.attachment) == (has_left, is_lost, attachment)
    assert found.present() == (() if has_left else ("p",))
    has_detached = attachment is DETACHED and peer.epoch > 0
    assert peer.has_told == (has_left or has_detached or attachment is REFUSED)
    kinds = [each.kind for each in told]
    assert not kinds or kinds[0] == "joined"
    assert all(one != other for one, other in itertools.pairwise(kinds))
    if attachment is ATTACHED and not (is_lost or has_left):
        assert kinds[-1] in ("joined", "returned")
    if has_left or has_detached:
        assert not peer.is_here


@pytest.mark.parametrize("length", range(1, 5))
def test_every_order_of_a_few_reports(length: int) -> None:
    """Twice, late, and after any other."""
    for reports in itertools.product(REPORTS, repeat=length):
        check_order(reports)


@pytest.mark.slow
@pytest.mark.parametrize("first", REPORTS)
def test_every_order_of_six_reports(first: Report) -> None:
    """The same, for all that begin so."""
    for reports in itertools.product(REPORTS, repeat=5):
        check_order((first, *reports))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1))
def test_the_latest_message_counts(messages: list[tuple[int, bool]]) -> None:
    """In each epoch a process attaches first, then leaves."""
    found, peer = group()
    told = [(epoch, is_attached and epoch > 0) for epoch, is_attached in messages]
    for epoch, is_attached in told:
        found.apply(peer, Event.ATTACH if is_attached else Event.DETACH, epoch=epoch)
    epoch, has_left = max((epoch, not is_attached) for epoch, is_attached in told)
    assert (peer.epoch, peer.attachment) == (epoch, DETACHED if has_left else ATTACHED)
    assert peer.has_answered


def test_a_peer_that_cannot_attach_until_it_does() -> None:
    """Who waits for it goes on; once it has attached, calls to it are made."""
    found, peer = group()
    error = WorkerUnreachable("p", "it does not have aiorpc_torch")
    assert found.apply(peer, Event.REFUSE, error) == []
    assert (peer.has_told, peer.refusal, peer.has_answered) == (True, error, False)
    assert found.told() == {"p": ""}
    found.apply(peer, Event.ATTACH, epoch=1)
    assert (peer.has_told, peer.refusal) == (False, None)


def test_an_answer_of_the_same_epoch_ends_a_refusal() -> None:
    """It did not answer once, as a link was cut; nothing is told of it again."""
    found, peer = group()
    found.apply(peer, Event.DETACH, epoch=1)
    found.apply(peer, Event.REFUSE, WorkerLost("p", "no answer"))
    assert found.apply(peer, Event.DETACH, epoch=1) == []
    assert (peer.attachment, peer.refusal) == (DETACHED, None)


def test_one_that_serves_is_not_refused() -> None:
    """A question to it that was not answered changes nothing; the end of torch's RPC here does."""
    found, peer = group()
    found.apply(peer, Event.ATTACH, epoch=1)
    found.apply(peer, Event.REFUSE, WorkerLost("p", "no answer"))
    assert (peer.attachment, peer.refusal, peer.has_told) == (ATTACHED, None, False)
    found.apply(peer, Event.REFUSE, NotInWorld("torch's RPC has ended"))
    assert (peer.attachment, peer.has_told) == (REFUSED, True)


def test_a_lost_peer_may_attach_again() -> None:
    """It is not forgotten before it has left torch's group, and then its calls fail."""
    found, peer = group()
    found.apply(peer, Event.ATTACH, epoch=1)
    found.apply(peer, Event.LOSS, WorkerLost("p", "frozen"))
    [joined] = found.apply(peer, Event.ATTACH, epoch=2)
    assert joined.change == Change("joined", "p", 1)
    assert peer.state is State.ALIVE
    assert peer.error is None
    left = WorkerLeft("p", "it has left torch's group")
    effects = found.apply(peer, Event.LEAVE_GROUP, left)
    assert [each.duty for each in effects] == [Duty.TELL, Duty.FAIL, Duty.END]
    assert found.lost() == {"p": left}
    assert found.apply(peer, Event.ATTACH, epoch=3) == [], "it has left for good"


def test_a_sign_of_life_ends_a_probe() -> None:
    """A peer that attaches lives."""
    found, peer = group()
    found.apply(peer, Event.CUT)
    found.apply(peer, Event.ATTACH, epoch=1)
    assert not peer.is_probed


def test_a_peer_that_has_not_attached_yet() -> None:
    """It has answered, and who waits for it goes on to wait."""
    found, peer = group()
    assert found.apply(peer, Event.DETACH) == []
    assert (peer.attachment, peer.epoch, peer.has_answered) == (DETACHED, 0, True)
    assert not peer.has_told


def test_another_process_under_the_name_of_a_member() -> None:
    """Readers of changes know the name already, since the end of the first one is not told."""
    found, peer = group()
    [joined] = found.apply(peer, Event.ATTACH, epoch=1)
    assert joined.change == Change("joined", "p", 1)
    other = found.admit(PeerInfo("p", 1, 7, ""))
    assert found.apply(other, Event.ATTACH, epoch=1) == []
    assert other.is_here


def test_a_late_message_of_a_peer_that_has_left() -> None:
    """It was sent before, so it does not answer a ping."""
    found, peer = group()
    found.apply(peer, Event.LEAVE_GROUP, WorkerLeft("p", "it has left torch's group"))
    found.apply(peer, Event.CUT)
    found.apply(peer, Event.ATTACH, epoch=1)
    assert peer.is_probed


@pytest.mark.parametrize("end", [Event.FAILURE, Event.ABANDON, Event.LEAVE])
@pytest.mark.parametrize("report", [each for each in REPORTS if each.event in ATTACHMENTS])
def test_a_peer_whose_block_has_ended_does_not_return(end: Event, report: Report) -> None:
    """Whatever is told of its attachment."""
    found, peer = group()
    found.apply(peer, end, WorkerLost("p", "for this test"))
    state = peer.state
    assert found.apply(peer, report.event, None, report.epoch) == []
    assert peer.state is state


def test_a_refusal_of_a_lost_peer() -> None:
    """It is no sign of life, and calls wait for no other loss."""
    found, peer = group()
    found.apply(peer, Event.LOSS, WorkerLost("p", "frozen"))
    assert found.apply(peer, Event.REFUSE, WorkerLost("p", "no answer")) == []
    assert peer.state is State.LOST


@pytest.mark.parametrize("event", [Event.DETACH, Event.REFUSE])
def test_what_does_not_answer_a_ping(event: Event) -> None:
    """The process may have ended since it left, or not be reached."""
    found, peer = group()
    found.apply(peer, Event.ATTACH, epoch=1)
    found.apply(peer, Event.CUT)
    found.apply(peer, event, WorkerLost("p", "no answer"), epoch=1)
    assert peer.is_probed
