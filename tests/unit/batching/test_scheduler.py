"""The decision when a batch starts, in virtual time: no clock, no loop, no threads.

`scheduler.Scheduler` is held against a naive model, a plain list and the rules written out, and
each rule of the batching once more by its name.

Each of these changes to `scheduler.py`, one at a time, makes tests of this file fail:

1.  `_reason`: `now >= oldest + max_wait` becomes `now > oldest + max_wait`
2.  `_reason`: the same comparison as `now - oldest >= max_wait`, which rounds differently
3.  `_reason`: a queue of exactly the size is not full (`>` for `>=`)
4.  `next_batch`: a running batch does not hold the next one back
5.  `_oldest`: the time of the newest item
6.  `add`: an item inherits the time of the oldest one, so a cancelled head still owns the timer
7.  `discard`: only asks whether the item waits, and leaves it there
8.  `_next_size`: one item too many
9.  `close`: hands the items out and keeps them
10. `Fill`: `max_wait < 0` in place of the closed range (in `test_policy_values.py`)
11. `_select_batch`: only looks at the oldest key, or at full ones first; `_peek`: outdated entries
12. `add`, `_remove`: a key that has become full, or a new oldest, is not in its heap
13. `_push`: never tidies, or drops valid entries
"""

import math
import pickle
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from aiorpc_torch import Fill, Round
from aiorpc_torch._batching.rounds import RoundScheduler
from aiorpc_torch._batching.scheduler import Batch, CallTraits, FillScheduler, Reason, Scheduler

Policy = Fill | Round

# Where adding a wait to a time rounds: from a fresh clock to the years since an epoch in
# nanoseconds, where a millisecond is less than the distance between two floats.
starts = st.sampled_from([0.0, 0.1, 1e3 / 3, 123_456.789, 1e9 + 0.1, 2.0**53, 1e18])
waits = st.one_of(
    st.just(0.0), st.sampled_from([5e-324, 1e-9, 0.002, 0.1, 0.3]), st.floats(0.0, 2.0)
)
gaps = st.one_of(st.just(0.0), st.sampled_from([0.001, 0.1, 0.3]), st.floats(0.0, 1.0))
sizes = st.integers(1, 5)
fills = st.builds(Fill, sizes, waits)
waiting_fills = st.builds(Fill, st.integers(2, 5), waits.filter(bool))
policies: st.SearchStrategy[Policy] = st.one_of(fills, st.builds(Round, sizes))

relaxed = settings(suppress_health_check=[HealthCheck.too_slow])


def new(policy: Policy) -> Scheduler[int]:
    return FillScheduler(policy) if isinstance(policy, Fill) else RoundScheduler(policy)


def size_of(policy: Policy) -> int:
    return policy.max_size if isinstance(policy, Fill) else policy.size


# ── against a model ─────────────────────────────────────────────────────────────────────────────


@dataclass
class Model:
    """The rules of a batch, said as plainly as they can be."""

    policy: Policy
    line: list[tuple[int, float]] = field(default_factory=list)  # who waits, and since when
    busy: bool = False

    def deadline(self) -> float | None:
        if isinstance(self.policy, Round) or self.busy or not self.line:
            return None
        return self.line[0][1] + self.policy.max_wait

    def reason(self, now: float) -> Reason | None:
        if self.busy or not self.line:
            return None
        if isinstance(self.policy, Round):
            return Reason.ROUND if len(self.line) >= self.policy.size else None
        if len(self.line) >= self.policy.max_size:
            return Reason.FULL
        if self.policy.max_wait == 0.0:
            return Reason.SLOT
        return Reason.WAITED if now >= self.line[0][1] + self.policy.max_wait else None

    def next_batch(self, now: float) -> tuple[tuple[int, ...], Reason] | None:
        reason = self.reason(now)
        if reason is None:
            return None
        gone, self.line = self.line[: size_of(self.policy)], self.line[size_of(self.policy) :]
        self.busy = True
        return tuple(item for item, _ in gone), reason

    def discard(self, item: int) -> bool:
        here = [entry for entry in self.line if entry[0] == item]
        self.line = [entry for entry in self.line if entry[0] != item]
        return bool(here)


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, cancellations, ends, looks and closes, at any times."""

    @initialize(policy=policies, start=starts)
    def begin(self, policy: Policy, start: float) -> None:
        self.scheduler: Scheduler[int] = new(policy)
        self.model = Model(policy)
        self.now = start
        self.added = 0
        self.gone: list[int] = []  # by a batch, a cancellation or the close

    @rule(gap=gaps)
    def add(self, gap: float) -> None:
        self.now += gap
        self.scheduler.add(self.added, self.now)
        self.model.line.append((self.added, self.now))
        self.added += 1

    @precondition(lambda self: self.added)
    @rule(pick=st.integers(0, 1_000))
    def discard(self, pick: int) -> None:
        """Of somebody who waits, who has left already, or who never came."""
        item = pick % (self.added + 1)
        known = self.model.discard(item)
        assert self.scheduler.discard(item) is known
        if known:
            self.gone.append(item)

    @precondition(lambda self: self.model.line)
    @rule()
    def discard_oldest(self) -> None:
        """The one who owns the timer."""
        oldest = self.model.line[0][0]
        assert self.scheduler.discard(oldest)
        self.model.discard(oldest)
        self.gone.append(oldest)

    @rule(gap=gaps)
    def look(self, gap: float) -> None:
        self.now += gap
        self.next_batch()

    @precondition(lambda self: self.model.deadline() is not None)
    @rule(nudge=st.sampled_from([-1, 0, 1]))
    def look_about_the_deadline(self, nudge: int) -> None:
        """At it, and at the floats next to it."""
        deadline = self.model.deadline()
        assert deadline is not None
        when = math.nextafter(deadline, math.inf * nudge) if nudge else deadline
        self.now = max(self.now, when)
        self.next_batch()

    def next_batch(self) -> None:
        expected = self.model.next_batch(self.now)
        batch = self.scheduler.next_batch(self.now)
        assert (batch and (batch.items, batch.reason)) == expected
        if batch is not None:
            self.gone += batch.items

    @precondition(lambda self: self.model.busy)
    @rule()
    def finish(self) -> None:
        self.scheduler.finish_batch(self.now)
        self.model.busy = False

    @precondition(lambda self: not self.model.busy)
    @rule()
    def finish_nothing(self) -> None:
        with pytest.raises(ValueError, match="no batch is running"):
            self.scheduler.finish_batch(self.now)

    @rule()
    def close(self) -> None:
        rest = tuple(item for item, _ in self.model.line)
        assert self.scheduler.close() == rest
        self.model.line.clear()
        self.gone += rest

    @invariant()
    def deadline_agrees(self) -> None:
        assert self.scheduler.deadline() == self.model.deadline()

    @invariant()
    def state_agrees(self) -> None:
        assert self.scheduler.is_idle is (not self.model.line and not self.model.busy)

    @invariant()
    def no_item_starts_twice_or_is_lost(self) -> None:
        here = [item for item, _ in self.model.line]
        assert sorted(self.gone + here) == list(range(self.added))


TestAgainstTheModel = SchedulerMachine.TestCase
TestAgainstTheModel.settings = settings(
    stateful_step_count=40, suppress_health_check=list(HealthCheck)
)


# ── a driver that acts at once ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Event:
    """`item` comes, or its caller gives up, at a time."""

    at: float
    item: int
    comes: bool


@dataclass
class Story:
    """What a driver saw."""

    batches: list[tuple[float, tuple[int, ...], Reason]] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)  # when each batch did
    discarded: list[int] = field(default_factory=list)
    closed: tuple[int, ...] = ()


def play(policy: Policy, events: list[Event], durations: list[float]) -> Story:
    """Drive a scheduler: `next_batch` after every event and at every deadline."""
    scheduler: Scheduler[int] = new(policy)
    story = Story()
    ends: list[float] = []  # of the batch that runs
    now = -math.inf

    def settle() -> None:
        while (batch := scheduler.next_batch(now)) is not None:
            assert not ends, "two batches run at once"
            ends.append(now + durations[len(story.batches) % len(durations)])
            story.batches.append((now, batch.items, batch.reason))
            assert scheduler.next_batch(math.inf) is None

    def run_until(limit: float) -> None:
        nonlocal now
        while (due := ends[0] if ends else scheduler.deadline()) is not None and due <= limit:
            now = max(now, due)
            if ends:
                story.ended.append(ends.pop())
                scheduler.finish_batch(now)
                settle()
            else:
                settle()
                assert ends, "the timer fired for nothing"

    for event in events:
        run_until(event.at)
        now = event.at
        if event.comes:
            scheduler.add(event.item, now)
        elif scheduler.discard(event.item):
            story.discarded.append(event.item)
        settle()
    run_until(math.inf)
    story.closed = scheduler.close()
    return story


@st.composite
def scripts(draw: st.DrawFn) -> list[Event]:
    """Arrivals numbered in order, and cancellations of those that have come."""
    now, came, events = draw(starts), 0, []
    for gap, pick in draw(st.lists(st.tuples(gaps, st.integers(0, 11)), max_size=30)):
        now += gap
        if pick < 7 or not came:
            events.append(Event(now, came, comes=True))
            came += 1
        else:
            events.append(Event(now, max(0, came - 1 - (pick - 7)), comes=False))
    return events


durations = st.lists(st.one_of(st.just(0.0), st.floats(0.0, 3.0)), min_size=1, max_size=6)


@relaxed
@given(policies, scripts(), durations)
def test_each_item_leaves_exactly_once(
    policy: Policy, events: list[Event], durations: list[float]
) -> None:
    """Whatever comes leaves in one batch, by its cancellation, or at the close: once."""
    story = play(policy, events, durations)
    ran = [item for _, items, _ in story.batches for item in items]
    came = [event.item for event in events if event.comes]
    assert sorted(ran + story.discarded + list(story.closed)) == came


@pytest.mark.promise("batching.bounded")
@relaxed
@given(policies, scripts(), durations)
def test_batches_are_bounded(policy: Policy, events: list[Event], durations: list[float]) -> None:
    """A batch has at least one and at most `max_size` members; a round exactly `size`."""
    for _, items, _ in play(policy, events, durations).batches:
        assert 1 <= len(items) <= size_of(policy)
        assert isinstance(policy, Fill) or len(items) == policy.size


@relaxed
@given(policies, scripts(), durations)
def test_first_come_first_served(
    policy: Policy, events: list[Event], durations: list[float]
) -> None:
    """Nobody overtakes: batch by batch and within each, members are in order of arrival."""
    ran = [item for _, items, _ in play(policy, events, durations).batches for item in items]
    assert ran == sorted(ran)


@pytest.mark.promise("batching.one_at_a_time")
@relaxed
@given(policies, scripts(), durations)
def test_one_batch_at_a_time(policy: Policy, events: list[Event], durations: list[float]) -> None:
    """A batch starts no earlier than the one before it has ended."""
    story = play(policy, events, durations)
    starts = [at for at, _, _ in story.batches]
    assert all(start >= end for start, end in zip(starts[1:], story.ended, strict=False))


@relaxed
@given(fills, scripts(), durations)
def test_a_fill_loses_no_item(fill: Fill, events: list[Event], durations: list[float]) -> None:
    """Without a close, everybody who does not give up is served in the end."""
    assert play(fill, events, durations).closed == ()


@pytest.mark.promise("batching.wait")
@relaxed
@given(fills, scripts(), durations)
def test_a_batch_leaves_at_the_first_moment_it_may(
    fill: Fill, events: list[Event], durations: list[float]
) -> None:
    """With a slot free, a batch leaves when it is full or its oldest live member has waited."""
    story = play(fill, events, durations)
    arrival = {event.item: event.at for event in events if event.comes}
    free_since = [-math.inf, *story.ended]
    for (at, items, reason), free in zip(story.batches, free_since, strict=False):
        expired = arrival[items[0]] + fill.max_wait
        full = arrival[items[-1]] if len(items) == fill.max_size else math.inf
        # A member may have been there, and left, when the batch was full for the first time, but
        # then it would have left in the batch: so the last one's arrival is that time.
        assert at == max(free, min(full, expired))
        assert reason is not Reason.SLOT or fill.max_wait == 0.0


@pytest.mark.promise("batching.leave")
@relaxed
@given(policies, scripts(), durations)
def test_who_gave_up_leaves_no_trace(
    policy: Policy, events: list[Event], durations: list[float]
) -> None:
    """Without the calls that were cancelled before they left, every batch leaves as it did."""
    story = play(policy, events, durations)
    vanished = set(story.discarded)
    rest = [event for event in events if event.item not in vanished]
    retold = play(policy, rest, durations)
    assert retold.batches == story.batches
    assert retold.closed == story.closed


@relaxed
@given(policies, scripts(), durations)
def test_too_late_to_give_up(policy: Policy, events: list[Event], durations: list[float]) -> None:
    """A cancellation after the batch has left changes no batch."""
    story = play(policy, events, durations)
    left = {item for _, items, _ in story.batches for item in items}
    timely = [event for event in events if event.comes or event.item not in left]
    assert play(policy, timely, durations).batches == story.batches


# ── each rule by its name ───────────────────────────────────────────────────────────────────────


def filled(policy: Policy, arrivals: list[float]) -> Scheduler[int]:
    scheduler: Scheduler[int] = new(policy)
    for item, at in enumerate(arrivals):
        scheduler.add(item, at)
    return scheduler


def leave(scheduler: Scheduler[int], now: float) -> Batch[int]:
    batch = scheduler.next_batch(now)
    assert batch is not None
    return batch


@relaxed
@given(waiting_fills, starts, gaps)
@example(Fill(2, 0.1), 1e9 + 0.1, 0.0)
@example(Fill(2, 0.002), 2.0**53, 0.0)
@example(Fill(2, 0.3), 123_456.789, 0.0)
def test_the_deadline_is_the_moment(fill: Fill, start: float, gap: float) -> None:
    """At `deadline()` a batch leaves, and just before it none does, however times round."""
    arrivals = [start, start + gap][: fill.max_size - 1]
    scheduler = filled(fill, arrivals)
    deadline = scheduler.deadline()
    assert deadline == start + fill.max_wait
    assert scheduler.next_batch(math.nextafter(deadline, -math.inf)) is None
    batch = leave(scheduler, deadline)
    assert batch.items == tuple(range(len(arrivals)))
    assert batch.reason is Reason.WAITED


@relaxed
@given(fills, starts, gaps, gaps)
def test_who_asks_at_the_deadline_never_asks_in_vain(
    fill: Fill, start: float, gap: float, late: float
) -> None:
    """Nor any time after it: a timer that was set for `deadline()` never spins."""
    scheduler = filled(fill, [start])
    deadline = scheduler.deadline()
    assert deadline is not None
    assert scheduler.next_batch(deadline + late) is not None


@pytest.mark.promise("batching.timer")
@given(starts, gaps)
def test_the_timer_belongs_to_the_oldest_who_still_waits(start: float, gap: float) -> None:
    """When the oldest gives up, the wait of the next one counts, from its own arrival."""
    scheduler = filled(Fill(5, 0.5), [start, start + gap, start + 2 * gap])
    assert scheduler.deadline() == start + 0.5
    scheduler.discard(1)
    assert scheduler.deadline() == start + 0.5
    scheduler.discard(0)
    assert scheduler.deadline() == start + 2 * gap + 0.5
    scheduler.discard(2)
    assert scheduler.deadline() is None


@given(sizes, st.integers(0, 12))
def test_no_wait_means_leave_when_a_slot_is_free(size: int, waiting: int) -> None:
    """With `max_wait=0.0` a batch leaves with whoever is there, as soon as none runs."""
    scheduler = filled(Fill(size), [0.0] * waiting)
    sizes = []
    while (batch := scheduler.next_batch(0.0)) is not None:
        sizes.append(len(batch.items))
        assert batch.reason is (Reason.FULL if len(batch.items) == size else Reason.SLOT)
        assert scheduler.next_batch(1e9) is None
        scheduler.finish_batch(0.0)
    assert sizes == [size] * (waiting // size) + [waiting % size] * (waiting % size > 0)
    assert scheduler.is_idle


def test_no_timer_while_a_batch_runs_or_nothing_waits() -> None:
    """`deadline()` is None where time alone changes nothing."""
    scheduler: Scheduler[int] = FillScheduler(Fill(2, 0.5))
    assert scheduler.deadline() is None
    scheduler.add(0, 1.0)
    leave(scheduler, 1.5)
    scheduler.add(1, 2.0)
    assert scheduler.deadline() is None
    scheduler.finish_batch(0.0)
    assert scheduler.deadline() == 2.5


@pytest.mark.promise("batching.late_binding")
@given(st.integers(1, 4), st.integers(0, 9), st.sets(st.integers(0, 8)))
def test_members_are_chosen_when_the_slot_is_free(
    size: int, coming: int, leaving: set[int]
) -> None:
    """The next batch is the longest start of the queue at the moment the last one ends."""
    scheduler: Scheduler[int] = FillScheduler(Fill(size))
    scheduler.add(-1, 0.0)
    leave(scheduler, 0.0)
    for item in range(coming):
        scheduler.add(item, 1.0)
        assert scheduler.next_batch(100.0) is None
    for item in leaving:
        scheduler.discard(item)
        assert scheduler.next_batch(100.0) is None
    scheduler.finish_batch(0.0)
    present = tuple(item for item in range(coming) if item not in leaving)
    batch = scheduler.next_batch(2.0)
    assert (batch.items if batch else ()) == present[:size]


def test_expired_while_the_slot_was_busy_leaves_with_those_who_came_since() -> None:
    """A batch whose time came while another ran takes the latecomers along."""
    scheduler = filled(Fill(4, 0.1), [0.0])
    leave(scheduler, 0.1)
    scheduler.add(1, 0.2)
    scheduler.add(2, 5.0)
    scheduler.finish_batch(0.0)
    batch = leave(scheduler, 5.0)
    assert (batch.items, batch.reason) == ((1, 2), Reason.WAITED)


@pytest.mark.promise("batching.stats")
@pytest.mark.parametrize(
    ("policy", "arrivals", "now", "reason"),
    [
        (Fill(2, 9.0), [0.0, 0.0], 0.0, Reason.FULL),
        (Fill(2, 9.0), [0.0, 0.0], 99.0, Reason.FULL),
        (Fill(2, 9.0), [0.0], 9.0, Reason.WAITED),
        (Fill(2), [0.0], 0.0, Reason.SLOT),
        (Fill(2), [0.0, 0.0], 0.0, Reason.FULL),
        (Fill(1), [0.0], 0.0, Reason.FULL),
        (Round(2), [0.0, 1.0], 1.0, Reason.ROUND),
        (Round(1), [0.0], 0.0, Reason.ROUND),
    ],
)
def test_a_batch_says_why_it_left(
    policy: Policy, arrivals: list[float], now: float, reason: Reason
) -> None:
    """Full comes before waited: the stronger reason is the one given."""
    assert leave(filled(policy, arrivals), now).reason is reason


@pytest.mark.promise("rounds.exact")
@given(st.integers(1, 5), st.integers(0, 14))
def test_a_round_is_exactly_its_size(size: int, coming: int) -> None:
    """No time makes a round leave short, and no item is in two."""
    scheduler = filled(Round(size), [0.0] * coming)
    members: list[int] = []
    while (batch := scheduler.next_batch(math.inf)) is not None:
        assert len(batch.items) == size
        members += batch.items
        scheduler.finish_batch(0.0)
    assert scheduler.deadline() is None
    assert members + list(scheduler.close()) == list(range(coming))


def test_closing_hands_back_who_waits_and_not_who_runs() -> None:
    """`close` returns the queue in order, once; the running batch still ends as it does."""
    scheduler = filled(Fill(2), [0.0] * 5)
    leave(scheduler, 0.0)
    assert scheduler.close() == (2, 3, 4)
    assert scheduler.close() == ()
    assert not scheduler.is_idle
    scheduler.finish_batch(0.0)
    assert scheduler.is_idle
    assert scheduler.next_batch(math.inf) is None


def test_discarding_a_stranger_is_harmless() -> None:
    """It says False for one that never came, has left in a batch or was discarded before."""
    scheduler = filled(Fill(1), [0.0, 0.0])
    leave(scheduler, 0.0)
    assert not scheduler.discard(0)
    assert not scheduler.discard(7)
    assert scheduler.discard(1)
    assert not scheduler.discard(1)


def test_batches_are_told_apart_by_identity() -> None:
    """Two batches with equal members are two batches: a driver may key a dict with them."""
    assert Batch((1,), Reason.FULL) != Batch((1,), Reason.FULL)
    assert len({Batch((1,), Reason.FULL), Batch((1,), Reason.FULL)}) == 2


@pytest.mark.parametrize("key", [None, 1])
def test_who_comes_and_goes_while_a_batch_runs_leaves_nothing(key: int | None) -> None:
    """However many they are, and however long the batch takes."""
    scheduler = filled(Fill(2), [0.0])
    leave(scheduler, 0.0)
    size = len(pickle.dumps(scheduler))
    for item in range(1, 2_000):
        scheduler.add(item, 1.0, CallTraits(key=key))
        scheduler.discard(item)
    assert len(pickle.dumps(scheduler)) < size + 1_000


def lined_up(keys: str) -> FillScheduler[int]:
    """Lines of two at most, that wait long; a batch runs, and these have come since."""
    scheduler: FillScheduler[int] = FillScheduler(Fill(2, 9.0))
    scheduler.add(-1, 0.0)
    leave(scheduler, 9.0)
    for item, key in enumerate(keys):
        scheduler.add(item, 9.0, CallTraits(key=key))
    return scheduler


@pytest.mark.parametrize(
    ("keys", "gone", "leaving"),
    [
        ("abb", [], [(1, 2)]),
        ("abbbb", [], [(1, 2), (3, 4)]),
        ("abbb", [1], [(2, 3)]),
        ("aabb", [1], [(2, 3)]),
        ("aabb", [], [(0, 1), (2, 3)]),
        ("abcbc", [], [(1, 3), (2, 4)]),
        ("a" + 40 * "b", [], [(item, item + 1) for item in range(1, 41, 2)]),
    ],
)
def test_a_full_key_does_not_wait_for_an_older_one(
    keys: str, gone: list[int], leaving: list[tuple[int, ...]]
) -> None:
    """Nor for one that was full, and is not any more."""
    scheduler = lined_up(keys)
    for item in gone:
        scheduler.discard(item)
    for items in leaving:
        scheduler.finish_batch(9.0)
        batch = leave(scheduler, 9.0)
        assert (batch.items, batch.reason) == (items, Reason.FULL)
    scheduler.finish_batch(9.0)
    assert scheduler.next_batch(9.0) is None
