"""The schedules of `any` and `map`, on generated answers, losses and consumers."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._client.group_schedule import LeastBusy, MapSchedule, Outcome

# ── any ─────────────────────────────────────────────────────────────────────────────────────────

LOADS = st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=1, max_size=8)


@given(st.lists(LOADS, max_size=20))
def test_the_least_busy_member_is_chosen(rounds: list[list[int | None]]) -> None:
    """It has the smallest load; a lost member is never chosen; without any there is no choice."""
    turns = LeastBusy()
    for loads in rounds:
        chosen = turns.choose(loads)
        live = [load for load in loads if load is not None]
        if not live:
            assert chosen is None
        else:
            assert chosen is not None
            assert loads[chosen] == min(live)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(0, 20))
def test_ties_take_turns(lost: list[bool], start: int) -> None:
    """As many choices as there are idle members choose each once, wherever the turn is."""
    turns = LeastBusy()
    for _ in range(start):
        turns.choose([0] * len(lost))
    loads = [None if each else 0 for each in lost]
    live = [position for position, load in enumerate(loads) if load is not None]
    assert sorted(turns.choose(loads) for _ in live) == live  # type: ignore[type-var]


@given(st.integers(2, 8), st.data())
def test_members_that_fail_are_passed_over(count: int, data: st.DataObject) -> None:
    """For as many choices as there are members, doubled after each failure in a row, while another
    one is there."""
    turns, failures, until = LeastBusy(), Counter[int](), Counter[int]()
    for choice in range(60):
        loads = [None if data.draw(st.integers(0, 9)) == 0 else 0 for _ in range(count)]
        live = {at for at, load in enumerate(loads) if load is not None}
        allowed = {at for at in live if until[at] <= choice}
        chosen = turns.choose(loads)
        assert chosen in (allowed or live or {None})
        if chosen is None:
            continue
        if data.draw(st.booleans()):
            failures[chosen] += 1
            turns.fail(chosen, count)
            until[chosen] = choice + 1 + count * min(2 ** (failures[chosen] - 1), 32)
        else:
            turns.succeed(chosen)
            failures[chosen] = until[chosen] = 0


@given(st.integers(2, 8))
def test_a_member_that_fails_always(count: int) -> None:
    """It is the only idle one, and gets 1 of 33 rounds of choices in the end."""
    turns = LeastBusy()
    loads: list[int | None] = [0] + [5] * (count - 1)
    calls = 0
    for _ in range(count * 200):
        if turns.choose(loads) == 0:
            calls += 1
            turns.fail(0, count)
    assert calls <= 12


# ── map ─────────────────────────────────────────────────────────────────────────────────────────


class Simulation:
    """A map over numbered items whose members answer, fail and are lost in a random order."""

    ordered = True

    def __init__(self, seed: int, items: int, members: int, in_flight: int, retries: int) -> None:
        self.random = random.Random(seed)
        self.items, self.members, self.in_flight = items, members, in_flight
        self.retries = retries
        self.schedule = MapSchedule(members, in_flight, retries, ordered=self.ordered)
        self.running: list[tuple[int, int]] = []
        self.lost: set[int] = set()
        self.taken = self.yielded = 0
        self.sent: Counter[int] = Counter()
        self.losses: Counter[int] = Counter()
        self.had: dict[int, list[int]] = {}
        self.order: list[int] = []  # of the items that were yielded

    def take(self) -> None:
        while self.schedule.may_take():
            if self.taken == self.items:
                self.schedule.exhaust()
                return
            assert self._free_slots(), "an item is taken only when a slot is free"
            assert self.schedule.take() == self.taken
            self.taken += 1
            self.assign()
            assert self.taken - self.yielded <= 4 * self.in_flight * self.members

    def assign(self) -> None:
        while (assigned := self.schedule.assign()) is not None:
            number, member = assigned
            assert member not in self.lost
            assert member not in self.had.setdefault(number, []), "another member after a loss"
            self.had[number].append(member)
            self.running.append(assigned)
            self.sent[number] += 1
            loads = Counter(each for _, each in self.running)
            assert loads[member] <= self.in_flight
            live = [loads[each] for each in range(self.members) if each not in self.lost]
            assert loads[member] - 1 == min(live) or loads[member] - 1 <= min(live)

    def answer(self, fails: bool = False) -> None:
        number, member = self.running.pop(self.random.randrange(len(self.running)))
        failure = LookupError(number) if fails else None
        self.schedule.answer(number, member, Outcome(None if fails else -number, failure))

    def lose(self, member: int) -> None:
        self.lost.add(member)
        gone = [number for number, each in self.running if each == member]
        self.running = [each for each in self.running if each[1] != member]
        for number in gone:
            self.losses[number] += 1
            self.schedule.lose(number, member, ConnectionError(number))

    def consume(self) -> list[Outcome]:
        found = []
        while (next_one := self.schedule.next_outcome()) is not None:
            self.yielded += 1
            self.order.append(next_one[0])
            found.append(next_one[1])
        return found

    def _free_slots(self) -> bool:
        loads = Counter(member for _, member in self.running)
        live = set(range(self.members)) - self.lost
        return any(loads[member] < self.in_flight for member in live)

    def step(self, loss: float, failure: float) -> list[Outcome]:
        self.take()
        self.assign()
        live = sorted({member for _, member in self.running})
        if live and self.random.random() < loss:
            self.lose(self.random.choice(live))
        elif self.running:
            self.answer(self.random.random() < failure)
        if self.random.random() < 0.7 or not self.running:
            return self.consume()
        return []

    def run(self, loss: float = 0.0, failure: float = 0.0) -> list[Outcome]:
        """Run to the end, or to the first failure; return the outcomes in order."""
        found: list[Outcome] = []
        for _ in range(20 * self.items + 100):
            found += self.step(loss, failure)
            if self.schedule.is_over or any(each.failure for each in found):
                return found
        raise AssertionError(f"it does not end: {self.schedule!r}")


SHAPES = st.tuples(
    st.integers(0, 1 << 30),  # seed
    st.integers(0, 40),  # items
    st.integers(1, 5),  # members
    st.integers(1, 3),  # in flight
    st.integers(0, 3),  # retries
)


@given(SHAPES)
def test_every_result_once_in_order(shape: Any) -> None:
    """Without failures the results are those of all items, in the order of the items."""
    simulation = Simulation(*shape)
    outcomes = simulation.run()
    assert [each.value for each in outcomes] == [-number for number in range(simulation.items)]
    assert simulation.schedule.is_over
    assert set(simulation.sent.values()) <= {1}


@given(SHAPES, st.floats(0.0, 0.5))
def test_losses_are_retried_elsewhere(shape: Any, loss: float) -> None:
    """An item of a lost member goes to another one, at most `retries` times."""
    simulation = Simulation(*shape)
    outcomes = simulation.run(loss)
    failed = [at for at, each in enumerate(outcomes) if each.failure is not None]
    good = outcomes[: failed[0]] if failed else outcomes
    assert [each.value for each in good] == [-number for number in range(len(good))]
    for number, sent in simulation.sent.items():
        assert sent <= 1 + simulation.retries, number
    if failed:
        number = outcomes[failed[0]].failure.args[0]  # type: ignore[union-attr]
        is_used_up = simulation.losses[failed[0]] > simulation.retries
        assert is_used_up or len(simulation.lost) == simulation.members
        assert number == failed[0] or len(simulation.lost) == simulation.members
    else:
        assert len(good) == simulation.items


@given(SHAPES, st.floats(0.01, 0.5))
def test_an_exception_is_raised_at_its_place(shape: Any, failure: float) -> None:
    """All results before it come first, and it is the first failure in the order of the items."""
    simulation = Simulation(*shape)
    outcomes = simulation.run(failure=failure)
    for place, outcome in enumerate(outcomes):
        if outcome.failure is not None:
            assert outcome.failure.args == (place,)
            break
        assert outcome.value == -place


@given(SHAPES)
def test_a_failing_source_fails_at_its_place(shape: Any) -> None:
    """The items before it are yielded; nothing is taken afterwards."""
    simulation = Simulation(*shape)
    broken = OSError("source")
    simulation.schedule.exhaust(broken)
    assert not simulation.schedule.may_take()
    simulation.schedule.exhaust(ValueError("later"))
    assert simulation.consume() == [Outcome(None, broken, ends_map=True)]
    assert simulation.schedule.is_over


class Unordered(Simulation):
    """The same, whose outcomes come as they complete, exceptions and losses too."""

    ordered = False

    def run(self, loss: float = 0.0, failure: float = 0.0) -> list[Outcome]:
        found: list[Outcome] = []
        for _ in range(20 * self.items + 100):
            found += self.step(loss, failure)
            if self.schedule.is_over:
                return found
        raise AssertionError(f"it does not end: {self.schedule!r}")


@given(SHAPES, st.floats(0.0, 0.3), st.floats(0.0, 0.5))
def test_every_outcome_once_as_it_completes(shape: Any, loss: float, failure: float) -> None:
    """Nothing waits for an item before it. The map ends early if all members are lost."""
    simulation = Unordered(*shape)
    outcomes = simulation.run(loss, failure)
    ends = [each.ends_map for each in outcomes]
    all_lost = len(simulation.lost) == simulation.members
    assert any(ends) <= all_lost
    if any(ends):
        assert all(each.failure for each in outcomes[ends.index(True) :])
    taken = simulation.order[: simulation.taken]
    assert sorted(taken) == [*range(simulation.taken)]
    assert all_lost or simulation.taken == simulation.items
    for item, outcome in zip(taken, outcomes, strict=False):
        if outcome.failure is None:
            assert outcome.value == -item
        elif isinstance(outcome.failure, LookupError):
            assert outcome.failure.args == (item,)


def test_a_slow_item_delays_no_other_one() -> None:
    schedule = MapSchedule(1, 3, 1, ordered=False)
    for _ in range(3):
        schedule.take()
        schedule.assign()
    schedule.answer(2, 0, Outcome("two"))
    schedule.answer(1, 0, Outcome("one"))
    assert [schedule.next_outcome(), schedule.next_outcome()] == [
        (2, Outcome("two")),
        (1, Outcome("one")),
    ]
    schedule.exhaust(failed := OSError("source"))
    assert schedule.next_outcome() is None
    schedule.answer(0, 0, Outcome("zero"))
    assert schedule.next_outcome() == (0, Outcome("zero"))
    assert schedule.next_outcome() == (3, Outcome(None, failed, ends_map=True))
    assert schedule.is_over


def test_the_bound_of_taken_items() -> None:
    """The first item is slow: of the others, so many are answered and wait for it, no more."""
    schedule = MapSchedule(2, 3, 1)
    answered = 0
    while schedule.may_take():
        schedule.take()
        assigned = schedule.assign()
        assert assigned is not None
        if assigned[0]:
            schedule.answer(*assigned, Outcome(None))
            answered += 1
    assert answered + 1 == 4 * 3 * 2
    assert schedule.next_outcome() is None


def test_a_withdrawn_item_uses_no_retry() -> None:
    """A member that was lost before an item was sent costs the item nothing."""
    schedule = MapSchedule(3, 1, 0)
    gone = ConnectionError()
    schedule.take()
    for lost in (0, 1):
        assert schedule.assign() == (0, lost)
        schedule.withdraw(0, lost, gone)
    assert schedule.assign() == (0, 2)
    schedule.withdraw(0, 2, gone)
    assert schedule.assign() is None
    assert schedule.next_outcome() == (0, Outcome(None, gone, ends_map=True))


def test_the_last_loss_fails_what_nobody_has() -> None:
    """Items that wait for a slot fail with the loss of the last member."""
    schedule = MapSchedule(1, 1, 5)
    schedule.take()
    assert schedule.assign() == (0, 0)
    schedule.lose(0, 0, gone := ConnectionError())
    assert not schedule.may_take()
    assert schedule.next_outcome() == (0, Outcome(None, gone, ends_map=True))
    assert schedule.next_outcome() == (1, Outcome(None, gone, ends_map=True))
    assert schedule.is_over


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_retries_are_counted_per_item(retries: int) -> None:
    """The item fails with the loss that exceeds them, though other members are left."""
    schedule = MapSchedule(9, 1, retries)
    schedule.take()
    for attempt in range(retries + 1):
        assigned = schedule.assign()
        assert assigned is not None
        schedule.lose(*assigned, ConnectionError(attempt))
    found = schedule.next_outcome()
    assert found is not None
    assert isinstance(found[1].failure, ConnectionError)
    assert found[1].failure.args == (retries,)
    assert not found[1].ends_map


@given(st.integers(1, 4), st.integers(1, 4))
def test_a_member_whose_connection_ends_has_no_more_items_than_before(
    in_flight: int, members: int
) -> None:
    """Each of its items is given again at once, as the answers for them come one by one."""
    schedule = MapSchedule(members, in_flight, 1)
    running: list[tuple[int, int]] = []

    def send() -> None:
        while schedule.may_take():
            schedule.take()
            while (assigned := schedule.assign()) is not None:
                running.append(assigned)
        while (assigned := schedule.assign()) is not None:
            running.append(assigned)
        assert max(Counter(member for _, member in running).values()) <= in_flight

    send()
    for index, member in [each for each in running if each[1] == 0]:
        running.remove((index, member))
        schedule.interrupt(index, member, ConnectionError())
        send()
    assert len(running) == members * in_flight


def test_an_interrupted_item_whose_members_are_lost_meanwhile() -> None:
    schedule = MapSchedule(1, 2, 1)
    assert [schedule.take(), schedule.take()] == [0, 1]
    assert [schedule.assign(), schedule.assign()] == [(0, 0), (1, 0)]
    schedule.lose(0, 0, ConnectionError("lost"))
    schedule.interrupt(1, 0, gone := ConnectionError("cut"))
    assert schedule.next_outcome() is not None
    assert schedule.next_outcome() == (1, Outcome(None, gone, ends_map=True))


def test_items_wait_for_a_member_that_is_made_again() -> None:
    """It gets them when it is restored, also those that other members have lost since."""
    schedule = MapSchedule(2, 1, 1)
    assert [schedule.take(), schedule.take()] == [0, 1]
    assert [schedule.assign(), schedule.assign()] == [(0, 0), (1, 1)]
    schedule.expect(0)
    schedule.lose(0, 0, ConnectionError("first"))
    schedule.lose(1, 1, ConnectionError("second"))
    assert schedule.assign() is None
    assert schedule.next_outcome() is None
    schedule.restore(0)
    assert schedule.assign() == (1, 0)
    schedule.answer(1, 0, Outcome("one"))
    assert schedule.assign() == (0, 0)
    schedule.answer(0, 0, Outcome("zero"))
    assert schedule.next_outcome() == (0, Outcome("zero"))
    assert schedule.next_outcome() == (1, Outcome("one"))


def test_items_fail_when_the_last_expected_member_is_given_up() -> None:
    schedule = MapSchedule(1, 1, 1)
    schedule.take()
    assert schedule.assign() == (0, 0)
    schedule.expect(0)
    schedule.lose(0, 0, ConnectionError("first"))
    refused = LookupError("refused")
    schedule.give_up(0, refused)
    assert schedule.next_outcome() == (0, Outcome(None, refused, ends_map=True))


def test_a_late_answer_leaves_a_restored_member_its_slots() -> None:
    """A call of the process before may end afterwards: the load is never negative."""
    schedule = MapSchedule(1, 1, 0)
    schedule.take()
    assert schedule.assign() == (0, 0)
    schedule.expect(0)
    schedule.restore(0)
    schedule.answer(0, 0, Outcome(None))
    schedule.take()
    schedule.take()
    assert schedule.assign() == (1, 0)
    assert schedule.assign() is None


# ── a map of members that change ────────────────────────────────────────────────────────────────


class Changing(Simulation):
    """The same of members that come and go; at the start there may be none."""

    def __init__(self, seed: int, items: int, members: int, in_flight: int, retries: int) -> None:
        super().__init__(seed, items, members, in_flight, retries)
        self.schedule = MapSchedule(members, in_flight, retries, changes=True)
        self.gone: set[int] = set()

    def change(self) -> None:
        """One member comes, goes, or answers again after a loss."""
        here = sorted(set(range(self.members)) - self.gone)
        if not here or self.random.random() < 0.5:
            assert self.schedule.admit() == self.members
            self.members += 1
        elif (member := self.random.choice(here)) in self.lost:
            self.schedule.restore(member)
            self.lost.discard(member)
            for had in self.had.values():  # it may get an item again that it was lost with
                had[:] = [each for each in had if each != member]
        else:
            self.schedule.dismiss(member)
            self.gone.add(member)
            self.lost.add(member)  # it gets no items; those that it has may be answered

    def run(self, loss: float = 0.0, failure: float = 0.0) -> list[Outcome]:
        found: list[Outcome] = []
        for _ in range(40 * self.items + 200):
            self.change()
            found += self.step(loss, failure)
            if self.schedule.is_over or any(each.failure for each in found):
                return found
        raise AssertionError(f"it does not end: {self.schedule!r}")


@given(SHAPES, st.floats(0.0, 0.5))
def test_members_come_and_go(shape: Any, loss: float) -> None:
    """Every result once in order; only an item whose retries are used up fails."""
    simulation = Changing(*shape)
    outcomes = simulation.run(loss)
    failed = [at for at, each in enumerate(outcomes) if each.failure is not None]
    good = outcomes[: failed[0]] if failed else outcomes
    assert [each.value for each in good] == [-number for number in range(len(good))]
    if failed:
        assert simulation.losses[failed[0]] > simulation.retries
    else:
        assert len(good) == simulation.items


def test_items_wait_for_the_first_member() -> None:
    """None is taken before, and the last loss fails none."""
    schedule = MapSchedule(0, 1, 1, changes=True)
    assert not schedule.may_take()
    first = schedule.admit()
    schedule.take()
    assert schedule.assign() == (0, first)
    schedule.lose(0, first, ConnectionError())
    schedule.dismiss(first)
    assert schedule.next_outcome() is None
    assert schedule.assign() is None
    assert schedule.admit() == first + 1
    assert schedule.assign() == (0, first + 1)
