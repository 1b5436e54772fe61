"""The policies in virtual time: keys, weights, slots and `max_pending`; quorums and members.

As test_scheduler.py, which has the strategies for times: two machines hold `FillScheduler` and
`RoundScheduler` against naive models, then each rule of docs/batching.md by its name.

Each of these changes, one at a time, makes tests of this file fail: most of them its machine and a
rule by its name.

`scheduler.py`

1.  `_select_batch`: full keys before those that came first; or only the key that came first
2.  `_peek`: a key whose oldest has left, or that is no longer full; `_remove`: no new oldest, no
    new full key; `_push`: tidies what is full away, or never tidies
3.  `_next_size`: `if weight > limit` without `count and`, so a heavy item is an empty batch
4.  `_next_size`: exactly `max_weight` is not full, or stops before the last one that fits
5.  `_next_size`: the weight of the last one in place of the sum; or a sum beyond `max_size`
6.  `deadline`: of any key; None while any batch runs, or although no slot is free
7.  `next_batch`: one batch more than `max_concurrent_batches`; a timed-out round takes a slot
8.  `can_accept`: one more than `max_pending`; or those in running batches count, too
9.  `_remove`: counts one for each batch; or leaves an empty queue behind
10. `close`: in order of keys, not of arrival; or it keeps the keys

`rounds.py`

11. `_timeout_at`: without `_last_end`; `finish_batch` or a timed-out round do not move it
12. `_select_batch`: a quorum of one more; or without waiting for the timeout
13. `_next_members`: a member twice; once though no `member` was given; its last contribution
14. `_time_out`: who came first is named first; who is present is missing; all of them
15. `add`: who contributes again keeps the position of its first time, or is remembered for ever
16. `add`: another kind is let in; or turned away and yet remembered

`policies.py`

17. a quorum above `size` or without a timeout; `weight` without `max_weight`; `max_weight=inf`
"""

import heapq
import math
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiorpc_torch import Fill, Round
from aiorpc_torch._batching.rounds import RoundScheduler
from aiorpc_torch._batching.scheduler import (
    Batch,
    CallTraits,
    FillScheduler,
    Reason,
    Scheduler,
    TimedOutRound,
)
from tests.unit.batching.test_scheduler import gaps, new, relaxed, starts, waits as any_waits

Policy = Fill | Round
Told = tuple[Any, ...]

sizes = st.integers(1, 4)
waits = any_waits | st.sampled_from([0.1, 0.5])  # so that company is waited for, and found
durations = st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=1, max_size=6)
# Their sums are exact in any order, so that a model need not add as the scheduler does.
weights = st.sampled_from([0, 0.25, 1, 1.0, 1.5, 2, 3, 7])
calls = st.builds(CallTraits, st.sampled_from([None, 0, 1]), weights, st.none())
names = st.integers(0, 2) | st.integers(0, 9)
contributions = st.builds(CallTraits, st.sampled_from("aaaaaaab"), st.just(1.0), names)
alike = st.builds(CallTraits, st.none(), st.just(1.0), names)
fills = st.builds(
    lambda size, wait, slots, room, most: Fill(
        size, wait, slots, room, hash, None if most is None else float, most
    ),
    *(sizes, waits, st.integers(1, 3), st.none() | st.integers(1, 6)),
    st.none() | st.integers(1, 6),
)
roomy = fills.map(lambda fill: replace(fill, max_pending=None))
weighed = roomy.filter(lambda fill: fill.max_weight is not None)
weightless = roomy.map(lambda fill: replace(fill, weight=None, max_weight=None))
members = st.sampled_from([None, hash])
timed = st.tuples(sizes, sizes, waits, members).map(
    lambda given: Round(max(given[:2]), min(given[:2]), given[2], given[3])
)
rounds = timed | st.builds(Round, sizes, st.none(), st.none() | waits, members)


class Entry(NamedTuple):
    """Who waits. Items are numbered in order of arrival."""

    item: int
    since: float
    traits: CallTraits


def weight_of(entries: list[Entry]) -> float:
    return sum(entry.traits.weight for entry in entries)


def queues_of(waiting: list[Entry]) -> list[list[Entry]]:
    """By key, in order of their oldest."""
    keys = dict.fromkeys(entry.traits.key for entry in waiting)
    return [[entry for entry in waiting if entry.traits.key == key] for key in keys]


# ── against a model ─────────────────────────────────────────────────────────────────────────────


@dataclass
class FillModel:
    """The rules of `Fill`, said as plainly as they can be."""

    policy: Fill
    waiting: list[Entry] = field(default_factory=list)
    running: int = 0

    def can_accept(self) -> bool:
        return self.policy.max_pending is None or len(self.waiting) < self.policy.max_pending

    def deadline(self) -> float | None:
        if self.running == self.policy.max_concurrent_batches or not self.waiting:
            return None
        return self.waiting[0].since + self.policy.max_wait

    def next_batch(self, now: float) -> Told | None:
        if self.running == self.policy.max_concurrent_batches:
            return None
        for line in queues_of(self.waiting):
            batch, full = self.together(line)
            waited = now >= line[0].since + self.policy.max_wait
            if full or waited or self.policy.max_wait == 0.0:
                self.running += 1
                self.waiting = [entry for entry in self.waiting if entry not in batch]
                late = Reason.WAITED if self.policy.max_wait else Reason.SLOT
                return tuple(entry.item for entry in batch), Reason.FULL if full else late
        return None

    def together(self, line: list[Entry]) -> tuple[list[Entry], bool]:
        """The start of a line that leaves together, and whether more could not join it."""
        most = math.inf if self.policy.max_weight is None else self.policy.max_weight
        for count in range(1, len(line) + 1):
            if weight_of(line[:count]) > most and count > 1:
                return line[: count - 1], True
            if count == self.policy.max_size or weight_of(line[:count]) >= most:
                return line[:count], True
        return line, False


@dataclass
class RoundModel:
    """The rules of `Round`, likewise."""

    policy: Round
    waiting: list[Entry] = field(default_factory=list)
    running: int = 0
    opened: float = -math.inf
    heard: list[Hashable] = field(default_factory=list)  # who contributed, ever, one by one

    def admits(self, traits: CallTraits) -> bool:
        return not self.waiting or self.waiting[0].traits.key == traits.key

    def deadline(self) -> float | None:
        if self.running or not self.waiting or self.policy.timeout is None:
            return None
        return max(self.waiting[0].since, self.opened) + self.policy.timeout

    def next_batch(self, now: float) -> Told | None:
        there: list[Entry] = []
        for entry in self.waiting:
            before = [other.traits.member for other in there]
            if self.policy.member is None or entry.traits.member not in before:
                there.append(entry)
        there = there[: self.policy.size]
        deadline, whole = self.deadline(), len(there) == self.policy.size
        over = deadline is not None and now >= deadline
        if self.running or not (whole or over):
            return None
        self.waiting = [entry for entry in self.waiting if entry not in there]
        items = tuple(entry.item for entry in there)
        if whole or (self.policy.quorum is not None and len(there) >= self.policy.quorum):
            self.running = 1
            return items, Reason.ROUND if whole else Reason.QUORUM
        self.opened = now
        present = tuple(entry.traits.member for entry in there)
        recent = dict.fromkeys(reversed(self.heard))
        absent = [member for member in recent if member not in present]
        return items, present, tuple(absent[: self.policy.size - len(present)])


class Machine(RuleBasedStateMachine):
    """Any order of arrivals, cancellations, ends, looks and closes, at any times."""

    def begin_with(self, model: FillModel | RoundModel, slots: int, start: float) -> None:
        self.model, self.slots, self.now = model, slots, start
        self.scheduler: Scheduler[int] = new(model.policy)
        self.added = 0
        self.gone: list[int] = []  # by a batch, a refusal, a cancellation or the close

    def arrive(self, traits: CallTraits) -> None:
        self.scheduler.add(self.added, self.now, traits)
        self.model.waiting.append(Entry(self.added, self.now, traits))
        self.added += 1

    @precondition(lambda self: self.model.waiting)
    @rule(pick=st.integers(0, 1_000))
    def discard(self, pick: int) -> None:
        """Of somebody who waits, who has left already, or who never came."""
        item = pick % (self.added + 1)
        rest = [entry for entry in self.model.waiting if entry.item != item]
        known = len(rest) < len(self.model.waiting)
        assert self.scheduler.discard(item) is known
        self.model.waiting = rest
        self.gone += [item] * known

    @precondition(lambda self: self.model.waiting)
    @rule()
    def discard_oldest(self) -> None:
        """The one who owns the timer."""
        self.discard(self.model.waiting[0].item)

    # Rules that would do nothing are left out, so that the others come more often.
    @precondition(lambda self: self.model.waiting and self.model.running < self.slots)
    @rule(gap=gaps)
    def look(self, gap: float) -> None:
        self.now += gap
        expected = self.model.next_batch(self.now)
        left = self.scheduler.next_batch(self.now)
        if isinstance(left, TimedOutRound):
            assert (left.items, left.present, left.missing) == expected
        else:
            assert (left and (left.items, left.reason)) == expected
        self.gone += left.items if left else ()

    @precondition(lambda self: self.model.deadline() is not None)
    @rule(nudge=st.sampled_from([-1, 0, 1]))
    def look_about_the_deadline(self, nudge: int) -> None:
        """At it, and at the floats next to it."""
        deadline = self.model.deadline()
        assert deadline is not None
        when = math.nextafter(deadline, math.inf * nudge) if nudge else deadline
        self.now = max(self.now, when)
        self.look(0.0)

    @precondition(lambda self: self.model.running)
    @rule(gap=gaps)
    def finish(self, gap: float) -> None:
        self.now += gap
        self.scheduler.finish_batch(self.now)
        self.model.running -= 1
        if isinstance(self.model, RoundModel):
            self.model.opened = self.now

    @precondition(lambda self: not self.model.running and self.added > 12)
    @rule()
    def finish_nothing(self) -> None:
        with pytest.raises(ValueError, match=r"^no batch is running$"):
            self.scheduler.finish_batch(self.now)

    @precondition(lambda self: self.added > 12)
    @rule()
    def close(self) -> None:
        rest = tuple(entry.item for entry in self.model.waiting)
        assert self.scheduler.close() == rest
        assert self.scheduler.close() == ()
        assert self.scheduler.next_batch(math.inf) is None
        self.model.waiting.clear()
        self.gone += rest

    @invariant()
    def state_agrees(self) -> None:
        model, scheduler = self.model, self.scheduler
        assert scheduler.deadline() == model.deadline()
        assert len(scheduler) == len(model.waiting)
        assert scheduler.is_idle is (not model.waiting and not model.running)
        assert model.running <= self.slots
        if model.running == self.slots:
            assert scheduler.next_batch(math.inf) is None

    @invariant()
    def no_item_starts_twice_or_is_lost(self) -> None:
        here = [entry.item for entry in self.model.waiting]
        assert sorted(self.gone + here) == list(range(self.added))


class FillMachine(Machine):
    @initialize(policy=fills, start=starts)
    def begin(self, policy: Fill, start: float) -> None:
        self.begin_with(FillModel(policy), policy.max_concurrent_batches, start)

    @rule(gap=gaps, burst=st.lists(calls, min_size=1, max_size=4))
    def add(self, gap: float, burst: list[CallTraits]) -> None:
        """What one loop iteration brings, as far as there is room."""
        assert isinstance(self.model, FillModel)
        self.now += gap
        for each in burst:
            assert self.scheduler.can_accept() is self.model.can_accept()
            if self.model.can_accept():
                self.arrive(each)


class RoundMachine(Machine):
    @initialize(policy=rounds, start=starts)
    def begin(self, policy: Round, start: float) -> None:
        self.begin_with(RoundModel(policy), 1, start)

    @rule(gap=gaps, burst=st.lists(contributions, min_size=1, max_size=4))
    def add(self, gap: float, burst: list[CallTraits]) -> None:
        """What one loop iteration brings, if it is of the kind of those that wait."""
        assert isinstance(self.model, RoundModel)
        self.now += gap
        for each in burst:
            assert self.scheduler.can_accept()
            if self.model.admits(each):
                self.arrive(each)
                self.model.heard.append(each.member)
            else:
                with pytest.raises(ValueError, match="differs"):
                    self.scheduler.add(self.added, self.now, each)


TestFillMachine, TestRoundMachine = FillMachine.TestCase, RoundMachine.TestCase
TestFillMachine.settings = TestRoundMachine.settings = settings(
    max_examples=2 * settings().max_examples,
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
)


@given(roomy, st.integers(0, 2**32))
def test_many_keys_and_much_coming_and_going(fill: Fill, seed: int) -> None:
    """What the machine does, longer and at random: books of what is gone are tidied meanwhile."""
    random, scheduler, model = Random(seed), FillScheduler[int](fill), FillModel(fill)
    staying, leaving, ending = random.random(), random.random() ** 3, random.random()
    keys, faithful = [None, *range(random.choice([1, 4, 20]))], random.randrange(9)
    for item in range(300):
        now = item * 0.01
        of = CallTraits(random.choice(keys), random.choice([0, 1, 2]))
        scheduler.add(item, now, of)
        model.waiting.append(Entry(item, now, of))
        while len(model.waiting) > faithful and random.random() > staying:
            gone = model.waiting.pop(random.randrange(faithful, len(model.waiting)))
            assert scheduler.discard(gone.item)
        assert scheduler.deadline() == model.deadline()
        if random.random() < leaving:
            batch = scheduler.next_batch(now)
            assert not isinstance(batch, TimedOutRound)
            assert (batch and (batch.items, batch.reason)) == model.next_batch(now)
        if model.running and random.random() < ending:
            scheduler.finish_batch(now)
            model.running -= 1
    assert scheduler.close() == tuple(entry.item for entry in model.waiting)


# ── a driver that acts at once ──────────────────────────────────────────────────────────────────

Event = tuple[float, int, CallTraits | None]  # at a time an item comes, or its caller gives up


class Left(NamedTuple):
    """What left, and what a driver knew just before."""

    at: float
    items: tuple[int, ...]
    reason: Reason | None  # None: they were refused
    missing: tuple[Hashable, ...]
    there: list[Entry]  # who left
    waiting: list[Entry]  # out of whom
    running: int
    free: float  # when the one before had ended, or was refused
    heard: list[Hashable]  # who had contributed, one by one


@dataclass
class Story:
    """What a driver saw."""

    left: list[Left] = field(default_factory=list)
    rests: list[tuple[float, int, list[Entry]]] = field(default_factory=list)  # since, run, wait
    turned_away: list[int] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    closed: tuple[int, ...] = ()


def play(policy: Policy, events: list[Event], durations: list[float]) -> Story:
    """Drive a scheduler: `next_batch` after every event and at every deadline."""
    scheduler, story = new(policy), Story()
    ends: list[float] = []  # of the batches that run
    waiting: list[Entry] = []
    heard: list[Hashable] = []
    now = free = -math.inf

    def settle() -> None:
        nonlocal waiting, free
        while (left := scheduler.next_batch(now)) is not None:
            reason, missing = (
                (None, left.missing) if isinstance(left, TimedOutRound) else (left.reason, ())
            )
            there = [entry for entry in waiting if entry.item in left.items]
            assert there, "no item left"
            assert left.items == tuple(entry.item for entry in there), "twice, or out of order"
            story.left.append(
                Left(now, left.items, reason, missing, there, waiting, len(ends), free, heard[:])
            )
            waiting = [entry for entry in waiting if entry not in there]
            if isinstance(left, Batch):
                heapq.heappush(ends, now + durations[len(story.left) % len(durations)])
            else:
                free = now
        story.rests.append((now, len(ends), waiting[:]))

    def run_until(limit: float) -> None:
        nonlocal now, free
        while True:
            deadline, before = scheduler.deadline(), len(story.left)
            due = min([*ends, math.inf if deadline is None else deadline])
            if due > limit or due == math.inf:
                return
            now = max(now, due)
            if ended := ends and ends[0] <= now:
                free = heapq.heappop(ends)
                scheduler.finish_batch(now)
            settle()
            assert ended or len(story.left) > before, "the timer fired for nothing"

    for at, item, of in events:
        run_until(at)
        now = at
        if of is None:
            if scheduler.discard(item):
                story.discarded.append(item)
                waiting = [entry for entry in waiting if entry.item != item]
        elif not scheduler.can_accept():
            story.turned_away.append(item)
            assert isinstance(policy, Fill)
            assert len(waiting) == policy.max_pending
        elif isinstance(policy, Round) and waiting and waiting[0].traits.key != of.key:
            story.turned_away.append(item)
        else:
            scheduler.add(item, now, of)
            waiting = [*waiting, Entry(item, now, of)]
            heard.append(of.member)
        settle()
    run_until(math.inf)
    story.closed = scheduler.close()
    return story


@st.composite
def scripts(draw: st.DrawFn, traits: st.SearchStrategy[CallTraits]) -> list[Event]:
    """Arrivals numbered in order, and cancellations of those that have come."""
    events: list[Event] = []
    now, came = draw(starts), 0
    steps, least = st.tuples(gaps, st.integers(0, 11), traits), draw(st.sampled_from([1, 15]))
    for gap, pick, of in draw(st.lists(steps, min_size=least, max_size=30)):
        now += gap
        if pick < 7 or not came:
            events.append((now, came, of))
            came += 1
        else:
            events.append((now, max(0, came - 1 - (pick - 7)), None))
    return events


def stories(policies: st.SearchStrategy[Any], traits: st.SearchStrategy[CallTraits]) -> Any:
    """A policy, events, the durations of functions, and the story of them."""
    given = st.tuples(policies, scripts(traits), durations)
    return given.map(lambda told: (*told, play(*told)))


ToldFill = tuple[Fill, list[Event], list[float], Story]
ToldRound = tuple[Round, list[Event], list[float], Story]
fill_stories, round_stories = stories(fills, calls), stories(rounds, contributions)


@relaxed
@given(fill_stories | round_stories)
def test_each_item_leaves_exactly_once(told: ToldFill | ToldRound) -> None:
    """In a batch, by a refusal, a cancellation or the close, if it was not turned away."""
    _, events, _, story = told
    left = [item for each in story.left for item in each.items]
    came = [item for _, item, of in events if of is not None]
    assert sorted(left + story.turned_away + story.discarded + list(story.closed)) == came


@pytest.mark.promise("batching.bounded")
@relaxed
@given(fill_stories)
def test_fills_are_bounded(told: ToldFill) -> None:
    """By members, by weight but for one alone, by slots and room; and they are of one key."""
    fill, _, _, story = told
    for each in story.left:
        assert 1 <= len(each.items) <= fill.max_size
        assert len(queues_of(each.there)) == 1
        assert each.running < fill.max_concurrent_batches
        assert fill.max_pending is None or len(each.waiting) <= fill.max_pending
        if fill.max_weight is not None and len(each.items) > 1:
            assert weight_of(each.there) <= fill.max_weight


@pytest.mark.promise("batching.keys")
@relaxed
@given(fill_stories)
def test_first_come_first_served_within_a_key(told: ToldFill) -> None:
    """Nobody overtakes in a line: from batch to batch, too, it is in order of arrival."""
    ran = [entry for each in told[-1].left for entry in each.there]
    assert all(line == sorted(line) for line in queues_of(ran))


def may_leave(fill: Fill, line: list[Entry], now: float) -> bool:
    full = fill.max_weight is not None and weight_of(line) >= fill.max_weight
    return full or len(line) >= fill.max_size or now >= line[0].since + fill.max_wait


@relaxed
@given(fill_stories)
def test_a_batch_of_a_key_starts_as_soon_as_it_may(told: ToldFill) -> None:
    """With a slot free, none rests that is full or whose oldest has waited."""
    fill, _, _, story = told
    untils = [now for now, _, _ in story.rests[1:]]
    for (now, running, waiting), until in zip(story.rests, untils, strict=False):
        for line in queues_of(waiting) if running < fill.max_concurrent_batches else []:
            assert not may_leave(fill, line, now)
            assert until <= line[0].since + fill.max_wait
    assert story.closed == ()


@pytest.mark.promise("batching.no_starvation")
@relaxed
@given(fill_stories)
def test_the_key_with_the_oldest_item_goes_first(told: ToldFill) -> None:
    """Of those that may leave; and none that may not does."""
    fill, _, _, story = told
    for each in story.left:
        ready = [line for line in queues_of(each.waiting) if may_leave(fill, line, each.at)]
        assert ready[0][0].item == each.items[0]


@pytest.mark.promise("batching.no_starvation")
@relaxed
@given(fill_stories)
def test_no_key_starves(told: ToldFill) -> None:
    """Who has waited `max_wait` sees no batch leave that is led by somebody who came later."""
    fill, _, _, story = told
    for each in story.left:
        waited = [e.item for e in each.waiting if each.at >= e.since + fill.max_wait]
        assert each.items[0] <= min(waited, default=math.inf)


@pytest.mark.promise("batching.late_binding")
@relaxed
@given(fill_stories)
def test_members_are_chosen_when_the_slot_is_free(told: ToldFill) -> None:
    """A batch is the longest start that fits of its line at that moment (late binding).

    But one that weighs `max_weight` is over: what weighs nothing does not join it.
    """
    fill, _, _, story = told
    for each in story.left:
        (line,) = (line for line in queues_of(each.waiting) if line[0] == each.there[0])
        count = len(each.there)
        assert line[:count] == each.there
        if count < min(len(line), fill.max_size):
            assert fill.max_weight is not None
            over = weight_of(line[:count]) >= fill.max_weight
            assert over or weight_of(line[: count + 1]) > fill.max_weight


def retold_without(gone: set[int], told: ToldFill | ToldRound) -> Story:
    policy, events, durations, _ = told
    return play(policy, [event for event in events if event[1] not in gone], durations)


@pytest.mark.promise("batching.leave")
@relaxed
@given(stories(weightless, calls) | stories(rounds, alike))
def test_who_gave_up_leaves_no_trace(told: ToldFill | ToldRound) -> None:
    """Without the calls that were cancelled all leave as they did; but a round may name them."""
    story = told[-1]
    again = retold_without(set(story.discarded), told)
    assert [each[:3] for each in again.left] == [each[:3] for each in story.left]
    assert again.closed == story.closed


@relaxed
@given(stories(weighed, calls))
def test_who_gave_up_before_anything_left_leaves_no_trace(told: ToldFill) -> None:
    """With weights not everybody: what came before an item may have left because it is heavy."""
    story = told[-1]
    saw = {entry.item for each in story.left for entry in each.waiting}
    again = retold_without(set(story.discarded) - saw, told)
    assert [each[:3] for each in again.left] == [each[:3] for each in story.left]


@pytest.mark.promise("rounds.quorum")
@relaxed
@given(round_stories)
def test_a_round_is_whole_or_its_time_is_over(told: ToldRound) -> None:
    """Then it is a quorum, or refused for want of one: and not a moment later."""
    policy, _, _, story = told
    for each in story.left:
        whole, enough = len(each.items) == policy.size, len(each.items) >= (policy.quorum or 9)
        assert each.running == 0
        assert each.reason is (Reason.ROUND if whole else Reason.QUORUM if enough else None)
        if policy.timeout is None:
            assert whole
        else:
            due = max(each.waiting[0].since, each.free) + policy.timeout
            assert each.at <= due if whole else each.at == due


@relaxed
@given(round_stories)
def test_no_item_waits_beyond_the_timeout_while_no_round_runs(told: ToldRound) -> None:
    """From its arrival, or the end of the round before; what is left over has a whole one ahead
    of it or its member in this one, and its turn comes."""
    policy, _, _, story = told
    for each in story.left:
        there = [entry.traits.member for entry in each.there]
        assert policy.member is None or len(set(there)) == len(there)
        for entry in each.waiting:
            bound = math.inf if policy.timeout is None else policy.timeout
            assert each.at <= max(entry.since, each.free) + bound
            again = policy.member is not None and entry.traits.member in there
            assert entry in each.there or again or len(there) == policy.size
    ran = [entry for each in story.left for entry in each.there]
    for member in {entry.traits.member for entry in ran}:
        own = [entry for entry in ran if entry.traits.member == member]
        assert own == sorted(own)
    assert policy.timeout is None or story.closed == ()


@pytest.mark.promise("rounds.timeout")
@relaxed
@given(round_stories)
def test_who_is_missing_was_there_before(told: ToldRound) -> None:
    """As many as the round is short of, if so many are known: those heard of last, last first."""
    policy, _, _, story = told
    for each in story.left:
        present = {entry.traits.member for entry in each.there}
        absent = [member for member in each.heard if member not in present]
        short = 0 if each.reason else policy.size - len(each.items)
        assert len(each.missing) == min(short, len(set(absent)))
        last = [max(i for i, each in enumerate(absent) if each == who) for who in each.missing]
        assert last == sorted(last, reverse=True)
        assert not last or set(absent[last[-1] :]) == set(each.missing)


# ── each rule by its name ───────────────────────────────────────────────────────────────────────


@pytest.mark.promise("batching.bounded")
@pytest.mark.parametrize(
    ("waiting", "full", "left"),
    [
        ([1, 2], [], 2),
        ([1, 3], [2], 0),
        ([1, 3, 1], [2], 1),
        ([1, 2, 2], [2], 1),
        ([1, 1, 1], [3], 0),
        ([0, 0, 0, 0], [3], 1),
        ([1, 1, 1, 1, 1], [3], 2),
        ([4, 4, 3], [1, 1], 1),
        ([1, 9, 1], [1, 1], 1),
        ([9, 0], [1], 1),
    ],
)
def test_what_fills_a_batch_by_weight(waiting: list[float], full: list[int], left: int) -> None:
    """A heavy item is in a batch of its own, waits for no other, and delays no other."""
    scheduler = new(Fill(3, 5.0, weight=float, max_weight=4))
    for item, weight in enumerate(waiting):
        scheduler.add(item, 0.0, CallTraits(weight=weight))
    for count in full:
        batch = scheduler.next_batch(0.0)
        assert isinstance(batch, Batch)
        assert (len(batch.items), batch.reason) == (count, Reason.FULL)
        assert batch.weight == sum(waiting[item] for item in batch.items)
        scheduler.finish_batch(0.0)
    assert scheduler.next_batch(0.0) is None
    assert len(scheduler) == left


def test_the_weight_of_a_batch_whose_policy_has_none() -> None:
    scheduler = new(Fill(3))
    scheduler.add(0, 0.0)
    batch = scheduler.next_batch(0.0)
    assert isinstance(batch, Batch)
    assert batch.weight == 0.0


def test_a_key_that_is_full_by_other_numbers() -> None:
    """It leaves before an older call of another key, though no call comes after `use`."""
    scheduler = FillScheduler[int](Fill(3, 9.0, key=hash))
    for item, key in enumerate("abb"):
        scheduler.add(item, 0.0, CallTraits(key))
    assert scheduler.next_batch(1.0) is None
    scheduler.use(Fill(2, 9.0, key=hash))
    batch = scheduler.next_batch(1.0)
    assert isinstance(batch, Batch)
    assert (batch.items, batch.reason) == ((1, 2), Reason.FULL)


def test_what_a_round_waits_for() -> None:
    """Its size, who is there, and who was there in the last one."""
    scheduler: RoundScheduler[int] = RoundScheduler(Round(3, member=hash))
    for item, member in enumerate(["a", "b", "c", "b"]):
        scheduler.add(item, 0.0, CallTraits(member=member))
    assert scheduler.next_batch(0.0) is not None
    assert scheduler.next_round() == (3, ("b",), ("c", "a"))


@pytest.mark.promise("batching.full")
@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 5))
def test_max_pending_counts_waiting_items(most: int, slots: int, pick: int) -> None:
    """Exactly `max_pending` fit, however many run; who leaves makes room for one."""
    scheduler = new(Fill(1, max_concurrent_batches=slots, max_pending=most))
    for item in range(slots):
        scheduler.add(item, 0.0)
        assert scheduler.next_batch(0.0) is not None
    for item in range(10, 10 + most):
        assert scheduler.can_accept()
        scheduler.add(item, 0.0)
    assert not scheduler.can_accept()
    assert scheduler.discard(10 + pick % most)
    assert scheduler.can_accept()


class Name:
    """A key or a member that one can see go."""


def test_who_came_and_went_is_forgotten() -> None:
    """New ones may come for ever: a round remembers a few, and those who were there last."""
    scheduler: Scheduler[int] = RoundScheduler(Round(2, timeout=1.0, member=hash))
    alive: weakref.WeakSet[Name] = weakref.WeakSet()
    for item in range(200):
        alive.add(name := Name())
        scheduler.add(item, 0.0, CallTraits(member=name))
        assert scheduler.discard(item)
    scheduler.add(200, 0.0, CallTraits(member="me"))
    refusal = scheduler.next_batch(1.0)
    assert isinstance(refusal, TimedOutRound)
    assert refusal.missing == (name,)
    assert 1 <= len(alive) <= 20


@pytest.mark.parametrize("size", [1, 2])
def test_an_empty_key_is_forgotten(size: int) -> None:
    """So are keys, a few aside, of full lines and of others, behind one that stays."""
    scheduler: Scheduler[int] = FillScheduler(Fill(size, 9.0, key=hash))
    alive: weakref.WeakSet[Name] = weakref.WeakSet()
    scheduler.add(-1, 0.0)
    for item in range(200):
        alive.add(name := Name())
        scheduler.add(item, 0.0, CallTraits(name))
        assert scheduler.discard(item)
    assert len(alive) <= 40
    scheduler.add(200, 0.0, CallTraits(name))
    assert scheduler.close() == (-1, 200)
    del name
    assert not alive


# ── numbers that change ─────────────────────────────────────────────────────────────────────────


def drained(scheduler: Scheduler[int], since: float) -> list[Any]:
    """Everything that leaves, one batch at a time, until nothing leaves any more."""
    told: list[Any] = []
    for now in (since, since + 1.0, since + 1e6):
        while (left := scheduler.next_batch(now)) is not None:
            told.append((now, left.items, getattr(left, "reason", None)))
            if isinstance(left, Batch):
                scheduler.finish_batch(now)
    return told


@given(
    st.tuples(fills, fills, st.lists(calls, max_size=12), st.lists(calls, max_size=4))
    | st.tuples(rounds, rounds, st.lists(alike, max_size=12), st.lists(alike, max_size=4)),
    st.sets(st.integers(0, 11)),
)
def test_other_numbers_count_as_if_they_always_had(
    told: tuple[Policy, Policy, list[CallTraits], list[CallTraits]], discarded: set[int]
) -> None:
    """`use` leaves a scheduler as one that had its policy before the first item."""
    before, after, arrivals, later = told
    changed, fresh = new(before), new(after)
    for each in (changed, fresh):
        for number, traits in enumerate(arrivals):
            each.add(number, float(number), traits)
        for number in discarded:
            each.discard(number)
    changed.use(after)
    now = float(len(arrivals))
    for each in (changed, fresh):
        for number, traits in enumerate(later):
            each.add(100 + number, now, traits)
    assert changed.deadline() == fresh.deadline()
    assert changed.can_accept() == fresh.can_accept()
    assert drained(changed, now) == drained(fresh, now)
