"""Tickets and versions: bounds that hold at every step, and no state without a way on."""

from typing import Any

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiorpc_torch.training.admission import Admission, Ticket


def test_tickets_have_the_newest_version_and_numbers_of_their_own() -> None:
    admission = Admission(1, 3, version=5)
    first = admission.start()
    admission.announce(6)
    second = admission.start()
    assert (first.version, second.version) == (5, 6)
    assert first.number != second.number
    assert (admission.in_flight, admission.staleness) == (2, 1)
    admission.end(first)
    assert (admission.in_flight, admission.staleness) == (1, 0)
    with pytest.raises(KeyError):
        admission.end(first)


def test_no_more_than_may_be_are_out() -> None:
    admission = Admission(0, 2)
    admission.start()
    last = admission.start()
    assert not admission.may_start()
    admission.end(last)
    assert admission.may_start()


def test_a_version_waits_for_old_tickets_and_new_tickets_for_the_version() -> None:
    admission = Admission(1, 9)
    old = admission.start()
    admission.propose(1)
    assert admission.may_announce(1)
    admission.announce(1)
    admission.withdraw(1)
    admission.propose(2)
    assert not admission.may_announce(2)
    assert admission.may_start()  # of version 1: it may be one behind
    admission.propose(3)
    assert not admission.may_start()
    admission.withdraw(3)
    assert admission.may_start()
    admission.end(old)
    assert admission.may_announce(2)


def test_a_rollout_that_waits_for_the_learner_keeps_no_version_back() -> None:
    admission = Admission(0, 2)
    ticket = admission.start()
    admission.park(ticket)
    admission.park(ticket)
    admission.unpark(ticket)
    assert admission.may_announce(1)
    assert (admission.in_flight, admission.staleness) == (1, 0)
    admission.unpark(ticket)
    assert not admission.may_announce(1)
    admission.end(ticket)
    admission.park(ticket)  # its last insert, after the rollout
    admission.unpark(ticket)
    assert admission.in_flight == 0


def test_no_maximum() -> None:
    admission = Admission(None, 1)
    admission.start()
    assert admission.may_announce(1_000)


@pytest.mark.parametrize(
    "arguments", [(-1, 1), (1.5, 1), (True, 1), (1, 0), (1, None), (1, 1, "3")]
)
def test_arguments_that_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"must be .*got"):
        Admission(*arguments)


class Tickets(RuleBasedStateMachine):
    """Rollouts that start and end, versions that are proposed, announced and withdrawn."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(2, 3)
        self.out: list[Ticket] = []
        self.proposed: list[int] = []
        self.numbers: set[int] = set()

    @precondition(lambda self: self.admission.may_start())
    @rule()
    def start(self) -> None:
        ticket = self.admission.start()
        assert ticket.version == self.admission.version
        assert ticket.number not in self.numbers
        self.numbers.add(ticket.number)
        self.out.append(ticket)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.admission.end(self.out.pop(data.draw(st.integers(0, len(self.out) - 1))))

    @rule(more=st.integers(0, 5))
    def propose(self, more: int) -> None:
        self.proposed.append(self.admission.version + more)
        self.admission.propose(self.proposed[-1])

    @precondition(lambda self: self.proposed)
    @rule(data=st.data(), is_cancelled=st.booleans())
    def announce_or_withdraw(self, data: st.DataObject, is_cancelled: bool) -> None:
        version = data.draw(st.sampled_from(self.proposed))
        if not is_cancelled:
            if not self.admission.may_announce(version):
                return
            before = self.admission.version
            self.admission.announce(version)
            assert self.admission.version == max(before, version)
        self.proposed.remove(version)
        self.admission.withdraw(version)

    @invariant()
    def bounds_hold(self) -> None:
        assert self.admission.in_flight == len(self.out) <= 3
        assert self.admission.staleness <= 2

    @invariant()
    def something_may_go_on(self) -> None:
        """A rollout starts, or a version is announced, or a rollout that runs will end."""
        may_announce = any(map(self.admission.may_announce, self.proposed))
        assert self.admission.may_start() or may_announce or self.out


TestTickets = Tickets.TestCase


@given(st.integers(0, 3), st.integers(1, 4))
def test_once_rollouts_have_ended_a_version_that_waits_is_announced(late: int, more: int) -> None:
    admission = Admission(late, 2)
    tickets = [admission.start(), admission.start()]
    admission.propose(late + more)
    assert not admission.may_announce(late + more)
    for ticket in tickets:
        admission.end(ticket)
        assert not admission.may_start()
    assert admission.may_announce(late + more)
