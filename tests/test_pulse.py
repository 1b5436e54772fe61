"""Who is alive, in virtual time: nobody is lost unasked, and nobody who is silent stays."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from aiorpc_torch._world.heartbeat import Pulse

PATIENCE = 8.0  # seconds: then a look comes every second, and sums are exact
INTERVAL = 1.0

peers = st.sampled_from(["a", "b", "c"])


def test_the_interval() -> None:
    """How often to look."""
    assert Pulse(PATIENCE).interval == INTERVAL


class Watch(RuleBasedStateMachine):
    """Peers that answer or do not, a clock that also jumps, and looks that come when they may."""

    def __init__(self) -> None:
        super().__init__()
        self.pulse = Pulse(PATIENCE)
        self.now = 0.0
        self.waited_for: set[str] = set()
        self.asked: dict[str, float] = {}  # and not heard of since
        self.sign: dict[str, float] = {}  # of whom somebody waits: when watching began, or a sign
        self.on_time: dict[str, bool] = {}  # whether every look since then was
        self.last_look: float | None = None

    @rule(peer=peers)
    def wait_for(self, peer: str) -> None:
        self.waited_for.add(peer)

    @rule(peer=peers)
    def wait_no_more(self, peer: str) -> None:
        self.waited_for.discard(peer)

    @rule(peer=peers)
    def hear(self, peer: str) -> None:
        """A message comes, from whomever."""
        self.pulse.heard(peer, self.now)
        self.asked.pop(peer, None)
        if peer in self.sign:
            self.sign[peer] = self.now
            self.on_time[peer] = True

    @rule()
    def hear_all(self) -> None:
        """Everybody who was asked answers."""
        for peer in [*self.asked]:
            self.hear(peer)

    @rule(passed=st.sampled_from([0.25, 0.5, 3.0, 20.0, 1000.0]))
    def stall(self, passed: float) -> None:
        """This process does nothing, for a moment or for long; then it looks."""
        self.now += passed
        self.look()

    @rule(times=st.integers(1, 10))
    def tick(self, times: int) -> None:
        """Looks that come in time."""
        for _ in range(times):
            self.now += INTERVAL
            self.look()

    def look(self) -> None:
        watched = set(self.waited_for)
        gap = INTERVAL if self.last_look is None else self.now - self.last_look
        self.last_look = self.now
        for peer in [*self.sign]:
            if peer not in watched:
                self.forget(peer)
            elif gap > INTERVAL:
                self.on_time[peer] = False
        for peer in watched - self.sign.keys():
            self.sign[peer], self.on_time[peer] = self.now, True
        ask, lost = self.pulse.look(self.now, watched)
        assert not set(ask) & set(lost)
        self.judge_lost(lost, gap)
        assert set(ask) <= watched, "nobody is asked for whom nobody waits"
        assert not set(ask) & self.asked.keys(), "asked once, until there is an answer"
        self.asked.update(dict.fromkeys(ask, self.now))

    def judge_lost(self, lost: Iterable[str], gap: float) -> None:
        for peer in lost:
            assert peer in self.asked, "it was asked, and gave no sign since"
            assert self.now - self.asked[peer] >= PATIENCE / 2, "it had time to answer"
            assert gap <= 2 * INTERVAL, "its answer may lie unread after a stall"
            self.forget(peer)
        for peer, since in self.sign.items():
            if self.on_time[peer]:
                assert self.now - since < PATIENCE, f"{peer} should be lost by now"

    def forget(self, peer: str) -> None:
        del self.sign[peer], self.on_time[peer]
        self.asked.pop(peer, None)


TestWatch = Watch.TestCase


gaps = st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.5, 4.0, 100.0]), max_size=40)


@given(gaps, st.floats(0, PATIENCE / 2, exclude_max=True))
def test_who_answers_is_never_lost(gaps: list[float], delay: float) -> None:
    """However late this process looks, and however late within its time the peer answers."""
    pulse, now, answers = Pulse(PATIENCE), 0.0, []
    for gap in gaps:
        now += gap
        for at in [at for at in answers if at <= now]:
            pulse.heard("peer", at)
            answers.remove(at)
        ask, lost = pulse.look(now, ["peer"])
        assert lost == []
        answers += [now + delay for _ in ask]


@given(st.integers(0, 7).map(lambda eighths: eighths / 8), st.integers(0, 20))
def test_who_falls_silent_is_lost_in_time(phase: float, spoke: int) -> None:
    """Wherever between two looks it was heard last: asked once, and lost within `patience`."""
    pulse, asked, now = Pulse(PATIENCE), [], 0.0
    last = max(0.0, spoke - 1 + phase)
    for now in map(float, range(100)):
        ask, lost = pulse.look(now, ["peer"])
        asked += [now for _ in ask]
        if lost:
            break
        if now <= last < now + 1:
            pulse.heard("peer", last)
            asked.clear()
        elif now < last:
            pulse.heard("peer", now)
            asked.clear()
    assert len(asked) == 1
    assert now - asked[0] >= PATIENCE / 2
    assert PATIENCE / 2 < now - last <= PATIENCE


def test_nobody_is_asked_for_whom_nobody_waits() -> None:
    """Silence of an idle peer is no concern, for however long."""
    pulse = Pulse(PATIENCE)
    for now in range(100):
        pulse.heard("talks", now)
        assert pulse.look(now, []) == ([], [])
    assert pulse.look(100, ["peer"]) == ([], []), "its silence is counted from now on"
    assert pulse.look(101, ["peer"]) == ([], [])
    assert pulse.look(102, ["peer"]) == (["peer"], [])


def test_who_is_no_longer_waited_for_starts_anew() -> None:
    """Neither its silence nor an old question counts when somebody waits again."""
    pulse = Pulse(PATIENCE)
    looks = [pulse.look(now, ["peer"]) for now in range(5)]
    assert looks[2] == (["peer"], [])
    pulse.look(5, [])
    assert [pulse.look(now, ["peer"]) for now in range(6, 9)] == [
        ([], []),
        ([], []),
        (["peer"], []),
    ]


def test_an_own_stall_loses_nobody() -> None:
    """Answers may lie there unread: there is time to read them first."""
    pulse = Pulse(PATIENCE)
    for now in range(3):
        ask, _ = pulse.look(now, ["peer"])
    assert ask == ["peer"]
    assert pulse.look(1000, ["peer"]) == ([], [])
    assert [pulse.look(1000 + more, ["peer"])[1] for more in range(1, 5)] == [[], [], [], ["peer"]]


def test_one_loss_is_told_once() -> None:
    """Then the peer is a stranger, who is asked again if anybody still waits."""
    pulse = Pulse(PATIENCE)
    looks = [pulse.look(now, ["peer"]) for now in range(14)]
    assert [now for now, (_, lost) in enumerate(looks) if lost] == [6, 13]
    assert [now for now, (ask, _) in enumerate(looks) if ask] == [2, 9]


class Name(str):
    """A peer's, at whose look-ups something else happens first."""

    __slots__ = ("before",)

    def __hash__(self) -> int:
        self.before()
        return super().__hash__()


@pytest.mark.parametrize("speaker", ["a", "b"])
def test_a_sign_of_life_in_the_middle_of_a_look(speaker: str) -> None:
    """Messages arrive in other threads: the look goes on, and the sign counts."""
    silent = [other for other in "ab" if other != speaker]
    for moment in itertools.count():
        pulse, names = Pulse(PATIENCE), [Name("a"), Name("b")]
        moments: list[int] = []

        def before(pulse: Pulse = pulse, moments: list[int] = moments) -> None:
            if len(moments) == moment:  # noqa: B023
                pulse.heard(speaker, 3.5)
            moments.append(0)

        looks = []
        for now in range(7):
            for name in names:
                name.before = before if now == 3 else lambda: None
            looks.append(pulse.look(now, names))
        if len(moments) <= moment:  # the look was over by then
            break
        assert [sorted(lost) for _, lost in looks] == [[], [], [], [], [], [], silent]
    assert moment > 4
