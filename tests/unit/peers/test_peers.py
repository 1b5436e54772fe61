"""The record of a peer: what each report changes, and what follows, in every order of reports."""

import functools
import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aiorpc_torch import NotInWorld, WorkerLeft, WorkerLost
from aiorpc_torch._peers import peers as peers_module
from aiorpc_torch._peers.changes import Change
from aiorpc_torch._peers.peers import RULES, Duty, Effect, Event, Peer, Peers, State, reason_of
from aiorpc_torch._torch.agent import PeerInfo

# Those of a world that `init_rpc` has not started.
EVENTS = [*Event][: [*Event].index(Event.ATTACH)]
LATE = PeerInfo("p", 1, 1, "")  # not there from the start


def peers() -> tuple[Peers, Peer]:
    """Return the peers of a worker, and one of them, which has entered."""
    found = Peers("me", [PeerInfo("me", 0, 0, ""), LATE])
    return found, found.peers["p"]


def error(reason: str) -> WorkerLost:
    return WorkerLost("p", reason)


def duties(effects: Iterable[Effect]) -> list[Duty]:
    return [each.duty for each in effects]


def reach(state: State) -> tuple[Peers, Peer]:
    """Return peers of which one is in a state."""
    found, peer = peers()
    ways = {
        State.ALIVE: [],
        State.LOST: [Event.LOSS],
        State.ABANDONED: [Event.LOSS, Event.ABANDON],
        State.FAILED: [Event.FAILURE],
        State.LEFT: [Event.LEAVE],
        State.ENDED: [Event.LEAVE, Event.LOSS],
    }
    for event in ways[state]:
        found.apply(peer, event, error(event.name))
    assert peer.state is state
    return found, peer


@pytest.mark.parametrize("state", State)
def test_who_is_lost_and_who_has_left(state: State) -> None:
    """Calls to one that has left are made until it ends."""
    _, peer = reach(state)
    assert peer.is_lost == (state not in (State.ALIVE, State.LEFT))
    assert peer.has_left == (state in (State.LEFT, State.ENDED))


# ── the four duties of a loss ─────────────────────────────────────────────────────────────────────


def test_a_loss_is_told_once() -> None:
    """Whoever reports it, however often; the first reason is told, the last one is raised."""
    found, peer = peers()
    effects = found.apply(peer, Event.LOSS, error("first"))
    assert duties(effects) == [Duty.TELL, Duty.FAIL, Duty.REPORT]
    assert effects[0].change == Change("lost", "p", 1, "first")
    assert all(each.peer is peer for each in effects)
    again = found.apply(peer, Event.LOSS, error("second"))
    assert Duty.TELL not in duties(again)
    assert Duty.REPORT not in duties(again)
    assert found.lost() == {"p": peer.error}
    assert peer.error is not None
    assert reason_of(peer.error) == "second"


def test_an_answer_from_before_a_connection_has_ended() -> None:
    """Its process may have died meanwhile: it is pinged once more."""
    found, peer = peers()
    assert duties(found.apply(peer, Event.CUT, error("first"))) == [Duty.PING]
    peer.is_pinged = True
    assert duties(found.apply(peer, Event.CUT, error("second"))) == [Duty.PING]
    peer.is_pinged = False
    assert duties(found.apply(peer, Event.ANSWER)) == [Duty.PING]
    assert peer.is_probed
    assert found.apply(peer, Event.ANSWER) == []
    assert not peer.is_probed


def test_a_loss_ends_the_wait_for_a_ping() -> None:
    """It is lost, and not probed any more: whoever waits for the answer goes on."""
    found, peer = peers()
    found.apply(peer, Event.CUT)
    assert peer.is_probed
    found.apply(peer, Event.LOSS, error("no answer"))
    assert not peer.is_probed
    assert peer.is_lost
    found.apply(peer, Event.CUT)
    found.apply(peer, Event.LOSS, error("no answer, again"))
    assert not peer.is_probed


@pytest.mark.parametrize(
    "event",
    [
        *(Event.ANSWER, Event.LOSS, Event.FAILURE, Event.LEAVE, Event.ABANDON, Event.ENTRY),
        Event.LEAVE_GROUP,
    ],
)
def test_what_ends_a_probe(event: Event) -> None:
    """An answer, an entry, and each report that the process has ended."""
    found, peer = peers()
    found.apply(peer, Event.CUT)
    found.apply(peer, event, error("for this test"))
    assert not peer.is_probed


@pytest.mark.parametrize("event", [Event.MESSAGE, Event.LEAVE, Event.FAILURE, Event.ABANDON])
@pytest.mark.parametrize("state", [State.ALIVE, State.ENDED])
def test_what_changes_no_state_does_not_end_a_probe(state: State, event: Event) -> None:
    """It may have been sent before the connection ended."""
    found, peer = reach(state)
    found.apply(peer, Event.CUT, error("its connection has ended"))
    found.apply(peer, event, error("for this test"))
    assert peer.is_probed == (peer.state is state)


@pytest.mark.parametrize("state", State)
def test_calls_that_wait_for_an_exit_code_are_failed(state: State) -> None:
    """In every state: a call may have been promised its reason in another thread, before."""
    found, peer = reach(state)
    effects = found.apply(peer, Event.EXIT, error("its connection has ended"))
    if duties(effects) == [Duty.AWAIT_EXIT]:
        assert found.apply(peer, Event.EXIT, error("another")) == [], "it is awaited once"
        effects = found.apply(peer, Event.LOSS, error("killed"))
    assert Duty.FAIL in duties(effects)
    assert peer.error is not None


@pytest.mark.parametrize("state", State)
def test_each_loss_fails_the_calls_that_were_sent_since(state: State) -> None:
    """A frozen peer may get calls while it is lost; one that has left may die."""
    found, peer = reach(state)
    [failed] = [
        each for each in found.apply(peer, Event.LOSS, error("again")) if each.duty is Duty.FAIL
    ]
    assert failed.error is peer.error is not None


def test_a_worker_that_nobody_starts_again_is_lost() -> None:
    """Though nobody has told of its loss."""
    found, peer = peers()
    effects = found.apply(peer, Event.ABANDON, ended := error("it has exited"))
    assert duties(effects) == [Duty.TELL, Duty.FAIL, Duty.REPORT]
    assert effects[1].error is peer.error is ended


@pytest.mark.parametrize("state", [State.ALIVE, State.LOST, State.ABANDONED])
def test_a_failure_of_its_block_fails_the_calls(state: State) -> None:
    """With what it has told; the loss is told and reported, unless it was before."""
    found, peer = reach(state)
    effects = found.apply(peer, Event.FAILURE, told := error("its block raised"))
    [failed] = [each for each in effects if each.duty is Duty.FAIL]
    assert failed.error is told
    is_new = state is State.ALIVE
    assert duties(effects) == ([Duty.TELL, Duty.FAIL, Duty.REPORT] if is_new else [Duty.FAIL])


@pytest.mark.parametrize("event", [Event.MESSAGE, Event.ANSWER, Event.CUT, Event.ENTRY])
@pytest.mark.parametrize("state", State)
def test_what_does_not_tell_of_an_end_fails_no_calls(state: State, event: Event) -> None:
    """One that has left may still send results; a connection may end alone."""
    found, peer = reach(state)
    assert Duty.FAIL not in duties(found.apply(peer, event, error("for this test")))


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.ABANDONED, Event.ABANDON),
        *((State.FAILED, event) for event in (Event.FAILURE, Event.LEAVE, Event.ABANDON)),
        *((State.LEFT, event) for event in (Event.FAILURE, Event.LEAVE)),
        *((State.ENDED, event) for event in (Event.FAILURE, Event.LEAVE, Event.ABANDON)),
    ],
)
def test_the_first_end_of_a_block_counts(state: State, event: Event) -> None:
    """Nothing follows from what is told of its end later."""
    found, peer = reach(state)
    assert found.apply(peer, event, error("for this test")) == []
    assert peer.state is state


def test_a_process_that_leaves_is_seen_off() -> None:
    """Once, and not if it is known to have ended."""
    for state in (State.ALIVE, State.LOST):
        found, peer = reach(state)
        assert duties(found.apply(peer, Event.LEAVE)) == [Duty.TELL, Duty.SEE_OFF]
    found, peer = reach(State.ABANDONED)
    assert duties(found.apply(peer, Event.LEAVE)) == [Duty.TELL]


# ── reasons ───────────────────────────────────────────────────────────────────────────────────────


def test_the_reason_of_an_exit() -> None:
    """It is that of the connection, for the case that the exit code stays unknown."""
    found, peer = peers()
    ended = error("its connection has ended")
    [awaited] = found.apply(peer, Event.EXIT, ended)
    assert awaited == Effect(Duty.AWAIT_EXIT, peer, ended)


def test_only_a_loss_is_told_with_a_reason() -> None:
    """A lost peer that turns out to have left in order has left without a reason."""
    found, peer = reach(State.LOST)
    told = found.apply(peer, Event.LEAVE)[0]
    assert told.change == Change("left", "p", 1)


def test_the_reason_of_an_error_that_names_no_worker() -> None:
    """It is the text of the error."""
    assert reason_of(NotInWorld("this worker leaves")) == "this worker leaves"


def test_what_a_peer_has_told_of_its_failure_stays_the_reason() -> None:
    """Also once its connection ends, its process does, and it is not started again."""
    found, peer = peers()
    told = error("its block raised")
    found.apply(peer, Event.FAILURE, told)
    for event in (Event.LOSS, Event.FAILURE, Event.EXIT, Event.ABANDON, Event.LOSS):
        found.apply(peer, event, error("other"))
    assert peer.error is peer.failure is told
    assert found.told() == {"p": "its block raised"}
    assert peer.final is not None


def test_a_worker_that_is_not_started_again() -> None:
    """It stays lost, though its last messages are read late."""
    found, peer = reach(State.ABANDONED)
    assert found.apply(peer, Event.MESSAGE) == []
    assert peer.state is State.ABANDONED
    assert peer.final is not None


def test_a_replacement_process() -> None:
    """It is lost until it has entered; what is reported of the old one changes nothing."""
    found, old = peers()
    told, ended = found.replace(PeerInfo("p", 1, 2, ""))
    assert told.change == Change("lost", "p", 1, "its process was replaced")
    assert (ended.duty, ended.peer) == (Duty.END, old)
    new = found.peers["p"]
    assert str(new.error) == str(ended.error) == str(error("its process was replaced"))
    for event in Event:
        assert found.apply(old, event, error("late")) == []
    assert new.state is State.LOST
    [entered] = found.apply(new, Event.ENTRY)
    assert entered.change == Change("returned", "p", 1)
    assert new.error is None


def test_a_name_that_comes_again() -> None:
    """After it had left, it joins; not before it has entered, though it may be heard."""
    found, old = peers()
    found.apply(old, Event.LEAVE)
    assert duties(found.replace(PeerInfo("p", 5, 2, ""))) == [Duty.END]
    new = found.peers["p"]
    assert found.apply(new, Event.MESSAGE) == []
    assert not new.is_here
    [entered] = found.apply(new, Event.ENTRY)
    assert entered.change == Change("joined", "p", 5)


def test_this_worker_is_never_lost() -> None:
    """Its connections to itself end too."""
    found, _ = peers()
    own = found.workers["me"]
    assert all(found.apply(own, event, error("odd")) == [] for event in Event)
    assert own.state is State.ALIVE


def test_a_peer_that_leaves_the_group_of_torch() -> None:
    """Its calls fail, in whatever state it is. A failure of its block is still one."""
    for state in State:
        found, peer = reach(state)
        left = WorkerLeft("p", "it has left torch's group")
        effects = found.apply(peer, Event.LEAVE_GROUP, left)
        ends = [Effect(Duty.FAIL, peer, left), Effect(Duty.END, peer, left)]
        change = Change("left", "p", 1)
        is_told = state in (State.ALIVE, State.LOST, State.ABANDONED)
        assert effects == [Effect(Duty.TELL, peer, None, change)] * is_told + ends
        assert peer.state is (State.FAILED if state is State.FAILED else State.ENDED)


def test_a_worker_that_dies_before_it_has_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told of it, and it is forgotten as others are; the last duty is to forget."""
    monkeypatch.setattr(peers_module, "KEPT_GONE", 1)
    found, _ = peers()
    effects: list[Effect] = []
    for number in (2, 3):
        late = found.admit(PeerInfo(f"late{number}", number, number, ""))
        effects = found.apply(late, Event.LOSS, error("killed"))
    assert duties(effects) == [Duty.FAIL, Duty.REPORT, Duty.FORGET]
    assert [*found.peers] == ["p", "late3"]


# ── every order ───────────────────────────────────────────────────────────────────────────────────


def expected(events: Sequence[Event]) -> str:
    """Return what the documentation promises after these reports of one process.

    A worker whose block has ended in order has left, whatever comes later. One that has failed, or
    that nobody starts again, does not return. Any other is lost from a loss to a sign of life.
    """
    end, is_lost = "", False
    for event in events:
        if event is Event.LEAVE and end in ("", "abandoned"):
            end = "left"
        elif event is Event.FAILURE:
            end = "left" if end == "left" else "failed"
        elif event is Event.ABANDON:
            end = end or "abandoned"
        is_lost = is_lost or event is Event.LOSS
        is_lost = is_lost and event not in (Event.MESSAGE, Event.ANSWER, Event.ENTRY)
    return end or ("lost" if is_lost else "alive")


def found_state(peer: Peer) -> str:
    if peer.has_left:
        return "left"
    if peer.failure is not None:
        return "failed"
    return peer.state.name.lower()


def check_order(events: Sequence[Event]) -> None:
    """Apply reports in an order; check the state, what is told, and who is told that it failed."""
    found, peer = peers()
    told: list[Change] = []
    reports = ends = 0
    for event in events:
        effects = found.apply(peer, event, error(event.name))
        told += [each.change for each in effects if each.change is not None]
        reports += duties(effects).count(Duty.REPORT)
        ends += duties(effects).count(Duty.SEE_OFF)
        assert peer.is_probed == (Duty.PING in duties(effects)) or event is not Event.CUT
    promised = expected(events)
    assert found_state(peer) == promised
    assert peer.is_lost == (peer.error is not None)
    assert reports == sum(each.kind == "lost" for each in told), "each loss is reported once"
    assert ends <= 1
    last = told[-1].kind if told else "joined"
    assert last == {"alive": "returned", "left": "left"}.get(promised, "lost") or not told
    for one, other in itertools.pairwise([Change("joined", "p", 1), *told]):
        assert one.kind != other.kind
        assert (other.kind == "returned") == (one.kind == "lost") or other.kind == "left"


@pytest.mark.parametrize("length", range(1, 5))
def test_every_order_of_a_few_reports(length: int) -> None:
    """Twice, late, and after any other."""
    for events in itertools.product(EVENTS, repeat=length):
        check_order(events)


@pytest.mark.slow
@pytest.mark.parametrize("first", EVENTS)
def test_every_order_of_six_reports(first: Event) -> None:
    """The same, for all that begin so."""
    for events in itertools.product(EVENTS, repeat=5):
        check_order((first, *events))


def test_every_state_has_a_rule_or_nothing_follows() -> None:
    """The rules name states and duties that there are, and FORGET is of the table."""
    for event, rules in RULES.items():
        for state, (after, what) in rules.items():
            assert isinstance(state, State)
            assert isinstance(after, State)
            assert Duty.FORGET not in what
            assert Duty.END not in what or event is Event.LEAVE_GROUP
    assert RULES.keys() == {*Event}


# ── all reporters at once ─────────────────────────────────────────────────────────────────────────


class Reporters(RuleBasedStateMachine):
    """A peer and its processes, its calls, and reporters that are late, repeat and contradict.

    Calls that wait are ended by FAIL, END or the answer; those of a connection that ends learn the
    error at once, unless their process is a child that ends: they are promised its reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found, self.peer = peers()
        self.number = 1
        self.posted: list[functools.partial[None]] = []  # reports on their way to the loop
        self.awaited: list[Peer] = []  # exit codes
        self.pinged: list[Peer] = []
        self.waiting: set[int] = set()  # calls that were promised an answer
        self.calls = itertools.count()
        self.told = ["joined"]
        self.random = random.Random(0)

    def run(self, effects: Sequence[Effect]) -> None:
        """Do what the driver does."""
        for duty, peer, reason, change in effects:
            if change is not None:
                assert change.kind != self.told[-1]
                self.told.append(change.kind)
            if duty in (Duty.FAIL, Duty.END):
                assert reason is not None
                self.waiting.clear()
            elif duty is Duty.AWAIT_EXIT:
                self.awaited.append(peer)
            elif duty is Duty.PING and not peer.is_pinged:
                peer.is_pinged = True
                self.pinged.append(peer)

    def apply(self, peer: Peer, event: Event) -> None:
        self.run(self.found.apply(peer, event, error(event.name)))

    @rule(is_exiting=st.booleans())
    def connection_ends(self, *, is_exiting: bool) -> None:
        """In another thread: what it returns is decided now, the report comes later."""
        peer = self.found.peers["p"]
        if peer.failure is None and peer.final is None:
            event = Event.EXIT if is_exiting else Event.CUT
            self.posted.append(functools.partial(self.apply, peer, event))
            if is_exiting:
                self.waiting.add(next(self.calls))

    @rule(event=st.sampled_from([Event.MESSAGE, Event.LEAVE, Event.FAILURE]))
    def it_tells(self, event: Event) -> None:
        self.posted.append(functools.partial(self.apply, self.found.peers["p"], event))

    @rule(event=st.sampled_from([Event.LOSS, Event.ABANDON, Event.ENTRY, Event.CUT]))
    def others_tell(self, event: Event) -> None:
        """A supervisor, the directory, silence, a wait that probes."""
        self.apply(self.found.peers["p"], event)

    @rule()
    def replaced(self) -> None:
        self.number += 1
        self.run(self.found.replace(PeerInfo("p", 1, self.number, "")))

    @rule(choice=st.randoms(use_true_random=False))
    def report_arrives(self, choice: Any) -> None:
        """One that is on its way, not the first perhaps."""
        if self.posted:
            self.posted.pop(choice.randrange(len(self.posted)))()

    @rule()
    def exit_code_is_known(self) -> None:
        if self.awaited and (peer := self.awaited.pop()).is_exiting:
            self.apply(peer, Event.LOSS)

    @rule(is_answered=st.booleans())
    def ping_ends(self, *, is_answered: bool) -> None:
        if self.pinged:
            peer = self.pinged.pop()
            peer.is_pinged = False
            self.apply(peer, Event.ANSWER if is_answered else Event.LOSS)

    @rule()
    def all_arrives(self) -> None:
        """Then no call waits that was promised an answer, and none waits for a ping."""
        while self.posted or self.awaited or self.pinged:
            self.report_arrives(self.random)
            self.exit_code_is_known()
            self.ping_ends(is_answered=self.random.random() < 0.5)
        assert not self.waiting
        assert not self.found.peers["p"].is_probed

    @invariant()
    def the_record_is_whole(self) -> None:
        peer = self.found.peers["p"]
        assert peer.is_lost == (peer.error is not None)
        assert peer.has_told == (peer.has_left or peer.failure is not None)
        if peer.is_here:
            assert not peer.has_left


TestReporters = Reporters.TestCase
