"""Activities and the waits for them: who is answered at which instant."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._world.activity import Activity, ActivityTable, Report, Wait

NAMES = ("a", "b", "c")


class World:
    """A table of three workers, and what each of them really does."""

    def __init__(self) -> None:
        self.processes = {name: number for number, name in enumerate(NAMES)}
        self.gone: set[str] = set()
        self.table = ActivityTable(self.processes.get, lambda: [*self.processes], lambda: self.gone)
        self.activities = dict.fromkeys(NAMES, Activity.ACTIVE)
        self.sequences = dict.fromkeys(NAMES, 0)
        self.answered: list[tuple[str, Activity]] = []
        self.waiting: set[str] = set()

    def report(self, name: str, activity: Activity) -> None:
        self.activities[name] = activity
        self.sequences[name] += 1
        report = Report(self.processes[name], self.sequences[name], activity)
        self.table.record(name, report)

    def begin(self, name: str, goal: Activity) -> None:
        self.report(name, goal)
        self.waiting.add(name)
        process = self.processes[name]
        answer = lambda is_reached: self.on_answer(name, goal, is_reached)  # noqa: E731
        self.table.add(Wait(name, process, 0, goal, (), answer))

    def on_answer(self, name: str, goal: Activity, is_reached: bool) -> None:
        self.waiting.discard(name)
        if is_reached:
            self.answered.append((name, goal))

    def cancel(self, name: str) -> None:
        if self.activities[name] is Activity.SERVING:
            self.report(name, Activity.ACTIVE)
            self.table.end(name, self.processes[name], 0)

    def replace(self, name: str) -> None:
        self.processes[name] += len(NAMES)
        self.activities[name] = Activity.ACTIVE
        self.sequences[name] = 0
        self.waiting.discard(name)
        self.gone.discard(name)

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
        elif step == "leave" and activity is not Activity.LEFT:
            world.cancel(name)
            world.begin(name, Activity.LEFT)
        elif step == "cancel":
            world.cancel(name)
        elif step == "lose":
            world.gone.add(name)
            world.waiting.discard(name)
        elif step == "find":
            world.gone.discard(name)
        elif step == "replace":
            world.replace(name)
        world.answered.clear()
        world.table.settle()
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
    world.table.settle()
    assert world.answered == []
    world.begin("b", Activity.LEFT)
    world.table.settle()
    assert sorted(name for name, _ in world.answered) == ["a", "c"]


def test_reports_out_of_order() -> None:
    """A late one changes nothing, nor does one of an old process or of a stranger."""
    processes = {"a": 0, "b": 4}
    table = ActivityTable(processes.get, lambda: [*processes])
    table.record("b", Report(4, 2, Activity.LEFT))
    for late in (Report(4, 1, Activity.ACTIVE), Report(1, 9, Activity.SERVING)):
        table.record("b", late)
    table.record("x", Report(0, 0, Activity.LEFT))
    assert table.left() == {"b"}
    processes["b"] = 5
    assert table.left() == set()


def test_a_repeated_wait_replaces_the_first() -> None:
    answers: list[Any] = []
    table = ActivityTable({"a": 0, "b": 1}.get, lambda: ["a", "b"])
    waits = [
        Wait(
            "a",
            0,
            7,
            Activity.LEFT,
            ("b",),
            lambda reached, number=number: answers.append((number, reached)),
        )
        for number in range(2)
    ]
    for each in waits:
        table.add(each)
    table.expire(waits[0])
    assert (answers, table.awaited()) == ([(0, False)], {"b"})
    table.record("b", Report(1, 0, Activity.LEFT))
    table.settle()
    table.end_all()
    assert answers == [(0, False), (1, True)]


@pytest.mark.parametrize("is_gone", [False, True])
def test_the_end_of_all_waits(is_gone: bool) -> None:
    """They are answered, but for that of a worker that is gone."""
    world = World()
    world.begin("a", Activity.LEFT)
    world.gone |= {"a"} if is_gone else set()
    world.table.settle()
    world.table.end_all()
    assert world.waiting == ({"a"} if is_gone else set())
