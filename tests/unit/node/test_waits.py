"""Waits for the activities of workers: who is answered at which instant."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._node.waits import Wait, Waits
from aiorpc_torch._peers.peers import Activity, Event, Peers, Report
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch.errors import WorkerLost

NAMES = ("a", "b", "c")


class World:
    """A waits of three workers, and what each of them really does."""

    def __init__(self) -> None:
        infos = [PeerInfo(name, number, number, "") for number, name in enumerate(NAMES)]
        self.members, self.gone = Peers("me", infos), set[str]()
        self.waits = Waits(self.members)
        self.activities = dict.fromkeys(NAMES, Activity.ACTIVE)
        self.sequences = dict.fromkeys(NAMES, 0)
        self.answered: list[tuple[str, Activity]] = []
        self.waiting: set[str] = set()

    def report(self, name: str, activity: Activity) -> None:
        self.activities[name] = activity
        self.sequences[name] += 1
        peer = self.members.peers[name]
        peer.record(Report(peer.worker_id, self.sequences[name], activity))

    def begin(self, name: str, goal: Activity) -> None:
        self.report(name, goal)
        self.waiting.add(name)
        process = self.members.peers[name].worker_id
        answer = lambda is_reached: self.on_answer(name, goal, is_reached)  # noqa: E731
        self.waits.add(Wait(name, process, 0, goal, (), answer))

    def on_answer(self, name: str, goal: Activity, is_reached: bool) -> None:
        self.waiting.discard(name)
        if is_reached:
            self.answered.append((name, goal))

    def cancel(self, name: str) -> None:
        if self.activities[name] is Activity.SERVING:
            self.report(name, Activity.ACTIVE)
            self.waits.end(name, self.members.peers[name].worker_id, 0)

    def replace(self, name: str) -> None:
        peer = self.members.peers[name]
        self.members.replace(PeerInfo(name, peer.rank, peer.worker_id + len(NAMES), ""))
        self.members.apply(self.members.peers[name], Event.ENTRY)
        self.activities[name] = Activity.ACTIVE
        self.sequences[name] = 0
        self.waiting.discard(name)
        self.gone.discard(name)

    def lose(self, name: str) -> None:
        self.gone.add(name)
        self.waiting.discard(name)
        self.members.apply(self.members.peers[name], Event.LOSS, WorkerLost(name, "frozen"))

    def find(self, name: str) -> None:
        self.gone.discard(name)
        self.members.apply(self.members.peers[name], Event.MESSAGE)

    def live(self, but: str) -> list[Activity]:
        return [self.activities[each] for each in NAMES if each not in self.gone | {but}]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["serve", "cancel", "leave", "lose", "find", "replace"]),
            st.sampled_from(NAMES),
        ),
        max_size=30,
    )
)
def test_waits_are_answered_when_their_goal_is_reached(steps: list[tuple[str, str]]) -> None:
    """At an instant at which it is reached, and no later; those that serve, all together."""
    world = World()
    for step, name in steps:
        activity = world.activities[name]
        if step == "serve" and activity is Activity.ACTIVE:
            world.begin(name, Activity.SERVING)
        elif step == "leave" and activity is not Activity.DONE:
            world.cancel(name)
            world.begin(name, Activity.DONE)
        elif step == "cancel":
            world.cancel(name)
        elif step == "lose":
            world.lose(name)
        elif step == "find":
            world.find(name)
        elif step == "replace":
            world.replace(name)
        world.answered.clear()
        world.waits.settle()
        world.waiting -= world.gone  # dropped: a worker that is found again repeats its request
        for each, goal in world.answered:
            assert all(found >= goal for found in world.live(each))
        for each, goal in world.answered:
            if goal is Activity.SERVING:
                world.activities[each] = Activity.ACTIVE
        for each in world.waiting - world.gone:
            assert any(found < world.activities[each] for found in world.live(each))


def test_a_server_that_stops_serving_is_waited_for() -> None:
    """`b` served before `c` did, but not at the same time."""
    world = World()
    world.begin("a", Activity.SERVING)
    world.begin("b", Activity.SERVING)
    world.cancel("b")
    world.begin("c", Activity.SERVING)
    world.waits.settle()
    assert world.answered == []
    world.begin("b", Activity.DONE)
    world.waits.settle()
    assert sorted(name for name, _ in world.answered) == ["a", "c"]


def test_reports_out_of_order() -> None:
    """A late one changes nothing, and a process that replaces another is active."""
    members = Peers("me", [PeerInfo("b", 1, 4, "")])
    peer = members.peers["b"]
    peer.record(Report(4, 2, Activity.DONE))
    peer.record(Report(4, 1, Activity.ACTIVE))
    peer.record(Report(4, 2, Activity.ACTIVE))
    assert peer.is_done
    members.replace(PeerInfo("b", 1, 5, ""))
    assert members.peers["b"].report == Report(5, -1, Activity.ACTIVE)


def test_no_wait_is_for_a_worker_that_the_coordinator_has_seen_leave() -> None:
    """Its own report is late, or lost."""
    world = World()
    peer = world.members.peers["b"]
    peer.is_done_there = True
    assert peer.is_done
    assert world.waits.missing("a", Activity.DONE) == ["c"]


def test_no_wait_is_for_a_worker_that_cannot_attach() -> None:
    """It does not answer, and is not lost."""
    infos = [PeerInfo(name, number, number, "") for number, name in enumerate(NAMES)]
    members = Peers("a", infos, is_attached=True)
    members.apply(members.peers["b"], Event.REFUSE, WorkerLost("b", "no answer"))
    assert Waits(members).missing("a", Activity.DONE) == ["c"]


def test_a_repeated_wait_replaces_the_first() -> None:
    answers: list[Any] = []
    members = Peers("me", [PeerInfo(name, number, number, "") for number, name in enumerate("ab")])
    table = Waits(members)
    waits = [
        Wait(
            "a",
            0,
            7,
            Activity.DONE,
            ("b",),
            lambda reached, number=number: answers.append((number, reached)),
        )
        for number in range(2)
    ]
    for each in waits:
        table.add(each)
    table.expire(waits[0])
    assert (answers, table.awaited()) == ([(0, False)], {"b"})
    members.peers["b"].record(Report(1, 0, Activity.DONE))
    table.settle()
    table.end_all()
    assert answers == [(0, False), (1, True)]


@pytest.mark.parametrize("is_gone", [False, True])
def test_the_end_of_all_waits(is_gone: bool) -> None:
    """They are answered, but for that of a worker that is gone."""
    world = World()
    world.begin("a", Activity.DONE)
    if is_gone:
        world.lose("a")
        world.waiting.add("a")
    world.waits.settle()
    world.waits.end_all()
    assert world.waiting == ({"a"} if is_gone else set())
