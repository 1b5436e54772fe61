"""Silence of peers in virtual time: silent peers are pinged first, then lost."""

from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from aiorpc_torch._peers.peers import Event, Peers
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch.errors import WorkerLost

NAMES = ["a", "b", "c", "peer", "talks"]
TIMEOUT = 8.0  # seconds: then a check comes every second, and sums are exact
INTERVAL = 1.0

peers = st.sampled_from(["a", "b", "c"])


class Tracker:
    """The peers of a worker, of which only the signs of life matter."""

    def __init__(self) -> None:
        self.peers = Peers("me", [PeerInfo(each, n, n, "") for n, each in enumerate(NAMES)])

    def record(self, peer: str, now: float) -> None:
        self.peers.peers[peer].last_heard = now

    def check(self, now: float, awaited: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the peers to ping and the lost ones."""
        to_ping, lost = self.peers.check_silence(now, TIMEOUT, {*awaited})
        return [each.name for each in to_ping], [each.name for each, _ in lost]


class Watch(RuleBasedStateMachine):
    """Peers that may answer, a clock that also jumps, and checks at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = Tracker()
        self.now = 0.0
        self.waited_for: set[str] = set()
        self.pinged: dict[str, float] = {}  # without a sign of life since
        self.sign: dict[str, float] = {}  # of watched peers: the last sign, or the start
        self.on_time: dict[str, bool] = {}  # whether every check since then was
        self.last_check: float | None = None

    @rule(peer=peers)
    def wait_for(self, peer: str) -> None:
        self.waited_for.add(peer)

    @rule(peer=peers)
    def wait_no_more(self, peer: str) -> None:
        self.waited_for.discard(peer)

    @rule(peer=peers)
    def hear(self, peer: str) -> None:
        """Record a message from a peer."""
        self.tracker.record(peer, self.now)
        self.pinged.pop(peer, None)
        if peer in self.sign:
            self.sign[peer] = self.now
            self.on_time[peer] = True

    @rule()
    def hear_all(self) -> None:
        """Let all pinged peers answer."""
        for peer in [*self.pinged]:
            self.hear(peer)

    @rule(passed=st.sampled_from([0.25, 0.5, 3.0, 20.0, 1000.0]))
    def stall(self, passed: float) -> None:
        """This process does nothing, for a moment or for long; then it checks."""
        self.now += passed
        self.check()

    @rule(times=st.integers(1, 10))
    def tick(self, times: int) -> None:
        """Check in time, several times."""
        for _ in range(times):
            self.now += INTERVAL
            self.check()

    def check(self) -> None:
        watched = set(self.waited_for)
        gap = INTERVAL if self.last_check is None else self.now - self.last_check
        self.last_check = self.now
        for peer in [*self.sign]:
            if peer not in watched:
                self.forget(peer)
            elif gap > INTERVAL:
                self.on_time[peer] = False
        for peer in watched - self.sign.keys():
            self.sign[peer], self.on_time[peer] = self.now, True
        to_ping, lost = self.tracker.check(self.now, watched)
        assert not set(to_ping) & set(lost)
        self.judge_lost(lost, gap)
        assert set(to_ping) <= watched, "only watched peers are pinged"
        assert not set(to_ping) & self.pinged.keys(), "pinged once, until there is an answer"
        self.pinged.update(dict.fromkeys(to_ping, self.now))

    def judge_lost(self, lost: Iterable[str], gap: float) -> None:
        for peer in lost:
            assert peer in self.pinged, "it was pinged, and gave no sign since"
            assert self.now - self.pinged[peer] >= TIMEOUT / 2, "it had time to answer"
            assert gap <= 2 * INTERVAL, "its answer may lie unread after a stall"
            self.forget(peer)
        for peer, since in self.sign.items():
            if self.on_time[peer]:
                assert self.now - since < TIMEOUT, f"{peer} should be lost by now"

    def forget(self, peer: str) -> None:
        del self.sign[peer], self.on_time[peer]
        self.pinged.pop(peer, None)


TestWatch = Watch.TestCase


gaps = st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.5, 4.0, 100.0]), max_size=40)


@pytest.mark.promise("lost.frozen")
@given(gaps, st.floats(0, TIMEOUT / 2, exclude_max=True))
def test_an_answering_peer_is_never_lost(gaps: list[float], delay: float) -> None:
    """However late this process checks, and however late within its time the peer answers."""
    tracker, now, answers = Tracker(), 0.0, []
    for gap in gaps:
        now += gap
        for at in [at for at in answers if at <= now]:
            tracker.record("peer", at)
            answers.remove(at)
        to_ping, lost = tracker.check(now, ["peer"])
        assert lost == []
        answers += [now + delay for _ in to_ping]


@pytest.mark.promise("lost.frozen")
@given(st.integers(0, 7).map(lambda eighths: eighths / 8), st.integers(0, 20))
def test_a_silent_peer_is_lost_in_time(phase: float, spoke: int) -> None:
    """It is pinged once and lost within the timeout, whenever its last sign came."""
    tracker, pinged, now = Tracker(), [], 0.0
    last = max(0.0, spoke - 1 + phase)
    for now in map(float, range(100)):
        to_ping, lost = tracker.check(now, ["peer"])
        pinged += [now for _ in to_ping]
        if lost:
            break
        if now <= last < now + 1:
            tracker.record("peer", last)
            pinged.clear()
        elif now < last:
            tracker.record("peer", now)
            pinged.clear()
    assert len(pinged) == 1
    assert now - pinged[0] >= TIMEOUT / 2
    assert TIMEOUT / 2 < now - last <= TIMEOUT


def test_unwatched_peers_are_not_pinged() -> None:
    """An idle peer may be silent for any time."""
    tracker = Tracker()
    for now in range(100):
        tracker.record("talks", now)
        assert tracker.check(now, []) == ([], [])
    assert tracker.check(100, ["peer"]) == ([], []), "its silence is counted from now on"
    assert tracker.check(101, ["peer"]) == ([], [])
    assert tracker.check(102, ["peer"]) == (["peer"], [])


def test_a_peer_that_is_watched_again_starts_anew() -> None:
    """Earlier silence and pings do not count."""
    tracker = Tracker()
    checks = [tracker.check(now, ["peer"]) for now in range(5)]
    assert checks[2] == (["peer"], [])
    tracker.check(5, [])
    assert [tracker.check(now, ["peer"]) for now in range(6, 9)] == [
        ([], []),
        ([], []),
        (["peer"], []),
    ]


@pytest.mark.parametrize("interval", [0.25, 0.5, 1.0, 2.0])
def test_a_silent_peer_is_pinged_after_a_quarter_of_the_timeout(interval: float) -> None:
    """It is lost half a timeout later, also if each second check is missing."""
    tracker = Tracker()
    pinged, lost = [], []
    for now in (number * interval for number in range(int(TIMEOUT / interval))):
        found = tracker.check(now, ["peer"])
        pinged += [now for _ in found[0]]
        lost += [now for _ in found[1]]
    assert (pinged, lost) == ([TIMEOUT / 4], [TIMEOUT * 3 / 4])


@pytest.mark.promise("lost.own_stall")
def test_an_own_stall_loses_no_peer() -> None:
    """Answers may be here unread: there is time to read them first."""
    tracker = Tracker()
    for now in range(3):
        to_ping, _ = tracker.check(now, ["peer"])
    assert to_ping == ["peer"]
    assert tracker.check(1000, ["peer"]) == ([], [])
    assert [tracker.check(1000 + more, ["peer"])[1] for more in range(1, 5)] == [
        [],
        [],
        [],
        ["peer"],
    ]


def test_a_loss_is_reported_once() -> None:
    """A lost peer that is still watched is pinged again."""
    tracker = Tracker()
    checks = [tracker.check(now, ["peer"]) for now in range(14)]
    assert [now for now, (_, lost) in enumerate(checks) if lost] == [6, 13]
    assert [now for now, (to_ping, _) in enumerate(checks) if to_ping] == [2, 9]


def test_a_probe_ends_with_any_later_message() -> None:
    """torch's connection to it may have failed too. What came before the probe does not count."""
    tracker = Tracker()
    peer = tracker.peers.peers["peer"]
    assert not tracker.peers.end_answered_probes(0.5)
    peer.last_heard = 1.0
    tracker.peers.apply(peer, Event.CUT)
    peer.last_heard = 1.5  # it was read late
    assert not tracker.peers.end_answered_probes(2.0)
    assert not tracker.peers.end_answered_probes(3.0)
    assert peer.is_probed
    peer.last_heard = 3.5
    assert tracker.peers.end_answered_probes(4.0)
    assert not peer.is_probed
    assert not tracker.peers.end_answered_probes(5.0)


def test_the_exit_of_a_child_is_awaited_whatever_comes() -> None:
    tracker = Tracker()
    peer = tracker.peers.peers["peer"]
    tracker.peers.apply(peer, Event.EXIT, WorkerLost("peer"))
    assert not tracker.peers.end_answered_probes(1.0)
    peer.last_heard = 1.5
    assert not tracker.peers.end_answered_probes(2.0)
    assert peer.is_probed


def test_a_peer_that_is_probed_is_watched() -> None:
    """Nothing may wait for it: its connection has ended. The error says how long it was silent."""
    tracker = Tracker()
    peer = tracker.peers.peers["peer"]
    peer.last_heard = 1.0
    tracker.peers.apply(peer, Event.CUT)
    found = [tracker.peers.check_silence(now, TIMEOUT, ()) for now in range(7)]
    assert [[*map(len, each)] for each in found] == [[0, 0]] * 3 + [[1, 0]] + [[0, 0]] * 3
    assert tracker.peers.check_silence(7.0, TIMEOUT, ()) == ([], [(peer, 6.0)])
    tracker.peers.apply(peer, Event.ANSWER)
    assert tracker.peers.check_silence(8.0, TIMEOUT, ()) == ([], [])
