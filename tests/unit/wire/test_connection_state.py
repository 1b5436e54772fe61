"""When calls and results are sent, in any order of calls, cancellations, answers and pauses."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aiorpc_torch._wire.connection_state import (
    BYTES_PER_CREDIT,
    FRAME_BYTES,
    MAX_CALLS,
    FlowWindow,
    ReplyState,
    SendState,
    credit_cost,
)
from aiorpc_torch._wire.slots import UNKNOWN_OBJECT

SIZES = st.sampled_from([0, 1, 100, FRAME_BYTES // 2, FRAME_BYTES, FRAME_BYTES + 1])
COUNTS = st.sampled_from([1, 2, 3, MAX_CALLS - 1, MAX_CALLS, MAX_CALLS + 1, 3 * MAX_CALLS])


OBJECTS = st.sampled_from(["a", "b", UNKNOWN_OBJECT])


@dataclass(frozen=True)
class Call:
    """A call as the queue sees it; a large one that is not copied goes by torch."""

    number: int
    size: int = 0
    is_large: bool = False
    on: Any = "object"
    is_copied: bool = False

    @property
    def by_torch(self) -> bool:
        return self.is_large and not self.is_copied


def object_of(call: Call) -> Any:
    return call.on


def new_state(
    pending: Container[int] = range(1000),
    window: FlowWindow | None = None,
    drop: Callable[[Call], None] = pytest.fail,
) -> SendState[Call]:
    """The state of a connection that is not open yet."""
    return SendState(pending, FlowWindow() if window is None else window, drop, object_of)


def batches_of(state: SendState[Call]) -> Iterator[list[Call]]:
    """The calls of each frame that may leave now."""
    return iter(state.take, [])


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


class Sending(RuleBasedStateMachine):
    """A model that keeps the calls in one list, in the order in which they were submitted."""

    @initialize(
        calls=st.sampled_from([1, 3, MAX_CALLS + 1, 1 << 20]),
        size=st.sampled_from([1, FRAME_BYTES, 1 << 40]),
    )
    def begin(self, calls: int, size: int) -> None:
        self.calls, self.bytes = calls, size
        self.pending: set[int] = set()
        self.window = FlowWindow(calls, size)
        self.dropped: list[Call] = []
        self.state = new_state(self.pending, self.window, self.dropped.append)
        self.unsent: list[Call] = []  # the queue, with calls that were given up
        self.given_up: set[int] = set()  # of those
        self.open: dict[int, int] = {}  # sent and not answered: their sizes
        self.cancels: list[int] = []
        self.credits: list[tuple[int, int]] = []
        self.number = 0
        self.forced = False

    def live(self) -> list[Call]:
        return [call for call in self.unsent if call.number not in self.given_up]

    def left(self, calls: list[Call]) -> None:
        """Check that those calls are the next ones, each for the first time."""
        live = self.live()
        assert calls == live[: len(calls)]
        gone = self.unsent.index(calls[-1]) + 1
        self.drop(self.unsent[:gone])
        del self.unsent[:gone]
        self.open.update((call.number, call.size) for call in calls)

    def drop(self, calls: list[Call]) -> None:
        """Check that those of the calls that were given up were dropped, in order, once."""
        expected = [call for call in calls if call.number in self.given_up]
        assert self.dropped[: len(expected)] == expected
        del self.dropped[: len(expected)]

    @rule(count=COUNTS, size=SIZES, is_large=st.booleans())
    def submit(self, count: int, size: int, is_large: bool) -> None:
        """A lone call is sent at once if one caller was woken; else a frame's worth is."""
        for _ in range(count):
            call = Call(self.number, size, is_large)
            is_idle = not self.pending
            self.number += 1
            self.pending.add(call.number)
            self.unsent.append(call)
            is_lone = is_idle and self.state.woken == 1
            now = self.state.submit(call, is_idle=is_idle)
            assert now is (is_lone or len(self.unsent) >= MAX_CALLS)

    @rule(count=st.integers(0, 3))
    def wake(self, count: int) -> None:
        """So many callers were woken by the last read."""
        self.state.woken = count

    @rule(which=st.lists(st.integers(0, 1000), min_size=1, max_size=20))
    def give_up(self, which: list[int]) -> None:
        """The peer is told of a call that was sent, and of no other."""
        for index in which:
            if not self.pending:
                return
            number = sorted(self.pending)[index % len(self.pending)]
            self.pending.discard(number)
            is_sent = number in self.open
            assert self.state.cancel(number) is is_sent
            if is_sent:
                self.cancels.append(number)
            else:
                self.given_up.add(number)

    @rule(number=st.integers(0, 5), credit=st.integers(1, 100))
    def grant(self, number: int, credit: int) -> None:
        """Credit for a stream waits for the next frame."""
        self.state.credits.append((number, credit))
        self.credits.append((number, credit))

    @rule()
    def control(self) -> None:
        """Cancellations and credit leave once, paused or not."""
        expected = self.cancels, self.credits
        assert self.state.controls() == (expected if any(expected) else None)
        assert self.state.controls() is None
        self.cancels, self.credits = [], []

    @rule()
    def flush_while_paused(self) -> None:
        """Nothing leaves, and nothing is dropped."""
        self.state.is_paused = True
        assert [*batches_of(self.state)] == []

    @rule(most=st.none() | st.integers(1, 3))
    def flush(self, most: int | None) -> None:
        """All that may leave does, in frames as full as they may be, until the socket is full."""
        self.state.is_paused = False
        batches = []
        for batch in batches_of(self.state):
            batches.append(batch)
            self.check_frame(batch)
            self.left(batch)
            self.state.is_paused = len(batches) == most
        for one, other in pairwise(batches):
            size = sum(call.size for call in one) + other[0].size
            alone = one[-1].is_large or other[0].is_large
            assert alone or len(one) == MAX_CALLS or size > FRAME_BYTES, "they were one frame"
        if self.state.is_paused:
            self.drop_behind()
            return
        self.drop(self.unsent if not self.live() else self.unsent[: self.first_live()])
        self.unsent = self.unsent[self.first_live() :]
        if self.unsent:
            assert not self.window.admits(self.unsent[0].size), "it might have left"

    def drop_behind(self) -> None:
        """Check calls that were given up, and dropped when the frame before them was made."""
        gone = len(self.dropped)
        assert gone <= self.first_live()
        self.drop(self.unsent[:gone])
        del self.unsent[:gone]

    def first_live(self) -> int:
        live = self.live()
        return self.unsent.index(live[0]) if live else len(self.unsent)

    def check_frame(self, batch: list[Call]) -> None:
        assert 0 < len(batch) <= MAX_CALLS
        assert len(batch) == 1 or sum(call.size for call in batch) <= FRAME_BYTES
        assert len(batch) == 1 or not any(call.is_large for call in batch)
        sizes = [*self.open.values(), *(call.size for call in batch)]
        if not self.forced:
            assert len(sizes) <= self.calls
            assert len(sizes) == 1 or sum(sizes) <= self.bytes

    @rule(is_paused=st.booleans())
    def force(self, is_paused: bool) -> None:
        """One call leaves though the window is full, the next in order; none if it is paused."""
        self.state.must_admit, self.state.is_paused = True, is_paused
        live = self.live()
        is_full = bool(live) and not self.window.admits(live[0].size)
        found = self.state.take()
        assert not self.state.must_admit
        if is_paused:
            assert not found
        elif found:
            assert not is_full or found == live[:1]
            self.forced = self.forced or is_full
            self.left(found)
            self.drop_behind()
        else:
            assert not live
            self.drop(self.unsent)
            self.unsent = []

    @rule(data=st.data(), count=st.integers(1, 300))
    def answer(self, data: st.DataObject, count: int) -> None:
        """Answers come, in any order."""
        for _ in range(min(count, len(self.open))):
            first, last = next(iter(self.open)), next(reversed(self.open))
            number = data.draw(st.sampled_from([first, last])) if count < 3 else first
            del self.open[number]
            self.pending.discard(number)
            self.window.answered([number])
        if not self.open:
            self.forced = False

    @rule()
    def clear(self) -> None:
        """The connection is lost: what was open is told, what had not left is dropped."""
        assert self.state.clear() == [*self.open]
        assert self.dropped == self.unsent
        self.dropped.clear()
        self.pending.clear()
        self.open.clear()
        self.unsent = []

    @invariant()
    def it_holds_what_has_not_left(self) -> None:
        """The queue and the window are those of the model; drops are told when they happen."""
        if not hasattr(self, "state"):
            return
        assert len(self.state) == len(self.unsent)
        assert (self.state.cancels, self.state.credits) == (self.cancels, self.credits)
        assert len(self.window) == len(self.open)
        assert self.dropped == []


TestSending = Sending.TestCase
TestSending.settings = settings(stateful_step_count=30)


def state_of(*calls: Call, window: FlowWindow | None = None) -> SendState[Call]:
    """An open connection with calls that wait to leave."""
    state = new_state(window=window)
    state.is_paused = False
    for call in calls:
        state.submit(call, is_idle=False)
    return state


def test_nothing_leaves_before_the_connection_is_open() -> None:
    """A new state is paused; cancellations and credit are told all the same."""
    state = new_state()
    assert state.is_paused
    state.submit(Call(0), is_idle=True)
    assert [*batches_of(state)] == []
    state.credits.append((0, 1))
    assert state.controls() == ([], [(0, 1)])
    assert repr(state) == "<SendState paused, 1 unsent, <Window 0 calls, 0 bytes>>"


@pytest.mark.parametrize("woken", [0, 1, 2, 3])
@pytest.mark.parametrize("is_idle", [False, True])
def test_calls_that_are_sent_at_once(woken: int, is_idle: bool) -> None:
    """A call of the only caller that was woken, when nothing else is under way."""
    state = state_of()
    state.woken = woken
    assert state.submit(Call(0), is_idle=is_idle) is (is_idle and woken == 1)


def test_a_call_that_skips_the_queue() -> None:
    """Its caller is the only one that was woken, and nothing else is under way."""
    for woken, is_paused in [(0, False), (1, True), (2, False), (1, False)]:
        state = state_of()
        state.woken, state.is_paused = woken, is_paused
        assert state.may_send_alone() is (woken == 1 and not is_paused)
    state.cancels.append(7)
    assert not state.may_send_alone()
    state.cancels.clear()
    state.credits.append((7, 32))
    assert not state.may_send_alone()
    state.credits.clear()
    state.submit(Call(0), is_idle=True)
    assert not state.may_send_alone()
    state.take()
    assert state.window
    assert not state.may_send_alone()


def test_a_new_connection() -> None:
    """It is paused, no caller was woken, and its repr tells what waits."""
    state = new_state()
    assert state.woken == 0
    assert not state.submit(Call(0), is_idle=True)
    assert repr(state) == "<SendState paused, 1 unsent, <Window 0 calls, 0 bytes>>"
    state.is_paused = False
    assert repr(state).startswith("<SendState open, ")


def test_a_full_frame_leaves_at_once() -> None:
    """The call that completes a frame sends it, and no earlier one does."""
    state = state_of()
    sent = [state.submit(Call(number), is_idle=False) for number in range(MAX_CALLS)]
    assert sent == [False] * (MAX_CALLS - 1) + [True]
    assert [len(batch) for batch in batches_of(state)] == [MAX_CALLS]


@pytest.mark.promise("transport.unsent")
@given(
    st.lists(st.tuples(SIZES, st.booleans()), max_size=3 * MAX_CALLS),
    st.sets(st.integers(0, 3 * MAX_CALLS)),
)
def test_cancelled_calls_are_never_sent(calls: list[tuple[int, bool]], gone: set[int]) -> None:
    """It is dropped in its turn; the others leave in order, each once."""
    pending = {*range(len(calls))} - gone
    dropped: list[Call] = []
    state = new_state(pending, drop=dropped.append)
    sent = [Call(number, *each) for number, each in enumerate(calls)]
    for call in sent:
        state.submit(call, is_idle=False)
    state.is_paused = False
    left = [call for batch in batches_of(state) for call in batch]
    assert left == [call for call in sent if call.number in pending]
    assert dropped == [call for call in sent if call.number in gone]
    assert len(state) == 0


def test_a_sent_call_is_cancelled_by_its_number() -> None:
    """The peer is told once, and of no call that was never sent."""
    state = state_of()
    state.submit(Call(3), is_idle=False)
    assert not state.cancel(3)
    assert state.take() == [Call(3)]
    assert state.cancel(3)
    assert state.controls() == ([3], [])
    assert state.controls() is None


def test_what_is_forced_through_a_full_window() -> None:
    """The next call that still waits; the cancelled ones before it are dropped."""
    dropped: list[Call] = []
    state = new_state({2, 3}, FlowWindow(1, 1), dropped.append)
    for number in (1, 2, 3):
        state.submit(Call(number), is_idle=False)
    state.window.sent(0, 1)
    state.is_paused = False
    assert state.take() == []
    state.must_admit = True
    assert state.take() == [Call(2)]
    assert state.take() == []
    assert dropped == [Call(1)]


@pytest.mark.parametrize("count", [1, MAX_CALLS, MAX_CALLS + 1, 3 * MAX_CALLS + 1])
def test_frames_of_many_calls(count: int) -> None:
    """Each but the last is full."""
    sizes = [len(each) for each in batches_of(state_of(*map(Call, range(count))))]
    assert sizes[:-1] == [MAX_CALLS] * ((count - 1) // MAX_CALLS)
    assert sum(sizes) == count
    assert sizes[-1] <= MAX_CALLS


def test_a_large_call_is_alone() -> None:
    """Those before and after it have frames of their own, in order."""
    calls = [Call(number, is_large=number in (2, 3)) for number in range(6)]
    batches = [[call.number for call in batch] for batch in batches_of(state_of(*calls))]
    assert batches == [[0, 1], [2], [3], [4, 5]]


@pytest.mark.promise("transport.large")
def test_a_call_that_fills_a_frame_is_alone() -> None:
    """One beyond the bytes of a frame leaves by itself, and holds nothing up."""
    sizes = [1, FRAME_BYTES + 1, 1, FRAME_BYTES - 1, 1]
    calls = [Call(number, size) for number, size in enumerate(sizes)]
    batches = [[call.number for call in batch] for batch in batches_of(state_of(*calls))]
    assert batches == [[0], [1], [2, 3], [4]]


@pytest.mark.promise("transport.window")
def test_a_full_window_holds_the_rest() -> None:
    """Calls behind the one that does not fit wait too, however small; answers let them go."""
    window = FlowWindow(10, 100)
    state = state_of(Call(0, 60), Call(1, 60), Call(2, 0), window=window)
    assert [*batches_of(state)] == [[Call(0, 60)]]
    assert [*batches_of(state)] == []
    window.answered([0])
    assert [*batches_of(state)] == [[Call(1, 60), Call(2, 0)]]


def test_what_joins_while_a_frame_leaves() -> None:
    """A call that is submitted between two frames leaves behind them."""
    state = state_of(Call(0, is_large=True), Call(1))
    batches = batches_of(state)
    assert next(batches) == [Call(0, is_large=True)]
    state.submit(Call(2), is_idle=False)
    assert [*batches] == [[Call(1), Call(2)]]


# ── calls behind a copy ─────────────────────────────────────────────────────────────────────────


class Copying(RuleBasedStateMachine):
    """A connection whose large calls are copied before they are sent, or go by torch.

    A call is sent when no earlier call of its object, or of an unknown one, is left to send.
    """

    @initialize(
        calls=st.sampled_from([1, 2, 3, 1 << 20]), size=st.sampled_from([4, FRAME_BYTES, 1 << 40])
    )
    def begin(self, calls: int, size: int) -> None:
        self.pending: set[int] = set()
        self.window = FlowWindow(calls, size)
        self.dropped: list[Call] = []
        self.state = new_state(self.pending, self.window, self.dropped.append)
        self.state.is_paused = False
        self.unsent: list[Call] = []  # that a caller waits for, as they were submitted
        self.told: list[int] = []  # sent, and then cancelled
        self.copying: list[Call] = []
        self.copied: set[int] = set()  # or known to go by torch
        self.fails: Iterator[bool] = iter(())
        self.open: list[int] = []  # sent and not answered
        self.number = 0

    @rule(
        on=OBJECTS,
        count=st.integers(1, 3),
        size=st.sampled_from([0, 1, 2, 3, FRAME_BYTES]),
        is_large=st.booleans(),
        is_copied=st.booleans(),
    )
    def submit(self, on: Any, count: int, size: int, is_large: bool, is_copied: bool) -> None:
        """Calls of one object."""
        for _ in range(count):
            call = Call(self.number, size, is_large, on, is_large and is_copied)
            self.number += 1
            is_idle = not self.pending
            self.pending.add(call.number)
            self.unsent.append(call)
            self.state.submit(call, is_idle=is_idle)

    @rule(fails=st.lists(st.booleans(), max_size=4))
    def flush(self, fails: list[bool]) -> None:
        """What may be sent is; some copies fail before they begin."""
        self.fails = iter(fails)
        for calls in batches_of(self.state):
            assert len({call.number for call in calls}) == len(calls)
            if calls[0].is_copied and calls[0].number not in self.copied:
                assert len(calls) == 1
                self.copy(calls[0])
            else:
                self.send(calls)

    def copy(self, call: Call) -> None:
        assert call in self.unsent
        assert call not in self.copying
        self.state.begin_copy(call, self.state._object_of(call))
        if not next(self.fails, False):
            self.copying.append(call)
            return
        self.state.stop_copy(call)
        self.copied.add(call.number)
        if not self.state.hold_back(call):
            self.send([call])

    def send(self, calls: list[Call]) -> None:
        """Check that each call is the next one of its object, and of those behind unknown ones."""
        assert len(calls) == 1 or not any(call.is_large for call in calls)
        for call in calls:
            assert call in self.unsent, "it was sent twice, or cancelled before"
            earlier = self.unsent[: self.unsent.index(call)]
            assert not [each for each in earlier if each.on in (call.on, UNKNOWN_OBJECT)]
            self.unsent.remove(call)
            self.open.append(call.number)

    @rule(is_paused=st.booleans())
    def pause(self, is_paused: bool) -> None:
        """The socket is full, or takes more."""
        self.state.is_paused = is_paused
        if is_paused:
            assert self.state.take() == []

    @rule(which=st.integers(0, 1000))
    def end_copy(self, which: int) -> None:
        """A copy ends, or fails: the call keeps its place, unless it is cancelled."""
        if self.copying:
            call = self.copying.pop(which % len(self.copying))
            assert self.state.end_copy(call) is (call in self.unsent)
            self.copied.add(call.number)

    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        """The peer is told of a call that was sent, and of no other."""
        if self.pending:
            number = sorted(self.pending)[which % len(self.pending)]
            self.pending.discard(number)
            is_sent = number in self.open
            assert self.state.cancel(number) is is_sent
            self.unsent = [each for each in self.unsent if each.number != number]
            if is_sent:
                self.told.append(number)

    @rule(which=st.integers(0, 1000))
    def answer(self, which: int) -> None:
        """The peer answers a call, a cancelled one too."""
        if self.open:
            number = self.open.pop(which % len(self.open))
            self.pending.discard(number)
            self.window.answered([number])

    @rule()
    def force(self) -> None:
        """The window is full, and no answer has come."""
        self.state.must_admit = True

    @rule()
    def clear(self) -> None:
        """The peer is lost: the sent calls are told, each other call is dropped."""
        assert sorted(self.state.clear()) == sorted(self.open)
        self.pending.clear()
        self.unsent.clear()
        self.open.clear()
        self.is_empty()

    @invariant()
    def it_knows_what_is_unsent(self) -> None:
        """Nothing is lost: what a caller waits for was sent, or is there."""
        if hasattr(self, "state"):
            assert len(self.state) >= len(self.unsent)
            assert {*self.open} <= {*self.window}
            assert self.state.cancels == self.told
            assert not {call.number for call in self.dropped} & {*self.pending, *self.open}
            assert len({call.number for call in self.dropped}) == len(self.dropped)

    def is_empty(self) -> None:
        """Nothing is left of any call."""
        assert len(self.state) == 0
        assert not self.window
        assert self.window.size == 0
        assert not self.state._admitted
        assert not self.state._copies.queues
        assert not self.state._copies.unfilled
        assert not self.state._copies._early

    def teardown(self) -> None:
        """With all copies ended and all calls answered, each call leaves, without being forced."""
        if not hasattr(self, "state"):
            return
        self.state.is_paused = self.state.must_admit = False
        for _ in range(2 * len(self.unsent) + 1):
            while self.copying:
                self.end_copy(0)
            self.flush([])
            while self.open:
                self.answer(0)
        assert not self.unsent, "it hangs"
        self.is_empty()


TestCopying = Copying.TestCase
TestCopying.settings = settings(stateful_step_count=30)


def large(number: int, on: Any = "a", size: int = 0) -> Call:
    """A call whose tensors are copied."""
    return Call(number, size, True, on, is_copied=True)


def copying(*calls: Call, window: FlowWindow | None = None) -> SendState[Call]:
    """A connection on which all these are being copied."""
    state = state_of(*calls, window=window)
    for call in calls:
        assert state.take() == [call]
        state.begin_copy(call, state._object_of(call))
    return state


@pytest.mark.promise("order.payload")
def test_calls_behind_a_copy_wait() -> None:
    """Those of its object; they follow it in order, and the last ones share a frame."""
    first = large(0)
    state = copying(first)
    for call in (Call(1, on="a"), Call(2, on="b"), Call(3, on="a"), Call(4, on="b")):
        state.submit(call, is_idle=False)
    assert [*batches_of(state)] == [[Call(2, on="b"), Call(4, on="b")]]
    assert len(state) == 3
    assert state.end_copy(first)
    assert [*batches_of(state)] == [[first], [Call(1, on="a"), Call(3, on="a")]]
    assert len(state) == 0


@pytest.mark.promise("order.payload")
def test_calls_behind_a_copy_of_an_unknown_object() -> None:
    """It may be the object of any of them: all wait."""
    first = large(0, UNKNOWN_OBJECT)
    state = copying(first)
    state.submit(Call(1, on="a"), is_idle=False)
    state.submit(Call(2, on="b"), is_idle=False)
    assert [*batches_of(state)] == []
    assert state.end_copy(first)
    assert [*batches_of(state)] == [[first], [Call(1, on="a"), Call(2, on="b")]]


@pytest.mark.promise("shared.order")
def test_later_large_calls_are_copied_meanwhile() -> None:
    """Whichever copy ends first, they are sent in order."""
    first, second = large(0), large(1)
    state = copying(first, second)
    assert state.end_copy(second)
    assert state.take() == []
    assert state.end_copy(first)
    assert [*batches_of(state)] == [[first], [second]]


def test_a_copy_that_fails_keeps_its_place() -> None:
    """Whether it begins or not: its call is sent in another way, behind those before it."""
    first, second = large(0), large(1)
    state = copying(first, second)
    state.stop_copy(second)
    assert state.hold_back(second)
    state.submit(Call(2, on="a"), is_idle=False)
    assert state.take() == []
    assert state.end_copy(first)
    assert [*batches_of(state)] == [[first], [second], [Call(2, on="a")]]
    alone = large(3)
    state = copying(alone)
    state.stop_copy(alone)
    assert not state.hold_back(alone)


@pytest.mark.promise("order.payload_released")
@pytest.mark.promise("transport.unsent")
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_call_that_is_cancelled_before_its_copy_is_sent(is_copied: bool) -> None:
    """The peer is not told of it, it leaves the window, and those behind it are sent."""
    pending, dropped = {0, 1, 2}, list[Call]()
    first, second = large(0), large(1)
    state = new_state(pending, drop=dropped.append)
    state.is_paused = False
    for call in (first, second, Call(2, on="a")):
        state.submit(call, is_idle=False)
    for call in (first, second):
        assert state.take() == [call]
        state.begin_copy(call, state._object_of(call))
    assert state.take() == []
    if is_copied:
        assert state.end_copy(second)
    pending.discard(1)
    assert not state.cancel(1)
    assert not state.cancel(1)
    assert 1 not in state.window
    assert is_copied or not state.end_copy(second)
    assert state.end_copy(first)
    assert [*batches_of(state)] == [[first], [Call(2, on="a")]]
    assert dropped == [second]
    assert state.controls() is None
    assert len(state) == 0


@pytest.mark.promise("transport.unsent")
def test_unsent_calls_that_another_connection_sends() -> None:
    """Those that are cancelled are dropped."""
    pending, dropped = {0, 2}, list[Call]()
    state = new_state(pending, drop=dropped.append)
    for number in range(3):
        state.submit(Call(number), is_idle=False)
    assert state.withdraw_pending() == [Call(0), Call(2)]
    assert dropped == [Call(1)]
    assert len(state) == 0


def state_amid_copies(dropped: list[Call]) -> tuple[SendState[Call], list[Call]]:
    """A state with the call 0 sent, and unsent ones: 1 is copied, 2 was, 3 is behind them."""
    calls = sent, first, second, _ = Call(0, on="b"), large(1), large(2), Call(3, on="a")
    state = new_state(drop=dropped.append)
    state.is_paused = False
    for call in calls:
        state.submit(call, is_idle=False)
    assert state.take() == [sent]
    for call in (first, second):
        assert state.take() == [call]
        state.begin_copy(call, state._object_of(call))
    assert state.take() == []
    assert state.end_copy(second)
    return state, [*calls[1:]]


@pytest.mark.promise("transport.unsent")
def test_what_is_unsent_when_the_peer_is_lost() -> None:
    """Calls that are copied, and calls behind them, though they are in the window."""
    state, unsent = state_amid_copies(dropped := [])
    assert state.clear() == [0]
    assert not state.window
    assert dropped == unsent
    assert not state.end_copy(unsent[0])
    assert len(state) == 0


@pytest.mark.promise("transport.unsent")
def test_unsent_calls_are_withdrawn_in_their_order() -> None:
    """For another connection: those that are copied too, which have to be copied again there."""
    state, unsent = state_amid_copies(dropped := [])
    state.submit(queued := Call(4, on="b"), is_idle=False)
    assert state.withdraw() == [*unsent, queued]
    assert not state.end_copy(unsent[0])
    assert [*state.window] == [0]
    assert len(state) == 0
    assert dropped == []


@pytest.mark.promise("transport.window")
def test_a_call_is_sent_once_it_has_left() -> None:
    """Not while its tensors are copied, nor behind a copy; no more when it is answered."""
    window, first, behind = FlowWindow(), large(0), Call(1, on="a")
    state = copying(first, window=window)
    state.submit(behind, is_idle=False)
    assert state.take() == []
    assert not any(map(state.was_sent, range(3)))
    assert state.end_copy(first)
    assert not any(map(state.was_sent, range(3)))
    assert [*batches_of(state)] == [[first], [behind]]
    assert [*map(state.was_sent, range(3))] == [True, True, False]
    window.answered([0])
    assert [*map(state.was_sent, range(3))] == [False, True, False]


def test_a_copied_call_whose_caller_has_gone() -> None:
    """It is dropped once: it is unsent no more, and later not withdrawn."""
    pending, dropped, first = {0, 1}, list[Call](), large(0)
    state = new_state(pending, drop=dropped.append)
    state.is_paused = False
    state.submit(first, is_idle=False)
    assert state.take() == [first]
    state.begin_copy(first, "a")
    assert state.end_copy(first)
    pending.remove(0)
    assert state.take() == []
    assert dropped == [first]
    assert state.withdraw() == []
    assert len(state) == 0


def test_calls_behind_a_copy_are_in_the_window() -> None:
    """So none of them keeps a copied one, whose answer would make room for it, from being sent."""
    window = FlowWindow(10, 10)
    first, other, behind = large(0, "a", 1), large(1, "b", 9), Call(2, 5, is_large=True, on="a")
    state = copying(first, other, window=window)
    state.submit(behind, is_idle=False)
    assert state.take() == []
    assert state.end_copy(first)
    assert [*batches_of(state)] == [[first]]
    window.answered([0])
    assert state.end_copy(other)
    assert [*batches_of(state)] == [[other]]
    window.answered([1])
    assert [*batches_of(state)] == [[behind]]


# ── results ─────────────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(
        st.one_of(
            st.tuples(COUNTS, SIZES, st.booleans()),
            st.none(),  # all that there is leaves
        ),
        max_size=8,
    )
)
def test_results_leave_in_order(steps: list[tuple[int, int, bool] | None]) -> None:
    """Each once, in frames that are as full as they may be; a lone one leaves at once."""
    state = ReplyState()
    sizes: list[int] = []
    unsent: list[Any] = []
    for step in [*steps, None]:
        if step is not None:
            count, size, is_last = step
            for _ in range(count):
                result = len(sizes), "plain", None
                sizes.append(size)
                unsent.append(result)
                assert state.add(result, size, is_last=is_last) is (is_last and len(unsent) == 1)
                assert repr(state) == f"<ReplyState {len(unsent)} unsent>"
            continue
        batches = [[*batch] for batch in state.take()]
        assert [result for batch in batches for result in batch] == unsent
        unsent.clear()
        for batch in batches:
            assert 0 < len(batch) <= MAX_CALLS
            assert len(batch) == 1 or sum(sizes[number] for number, *_ in batch) <= FRAME_BYTES
        for one, other in pairwise(batches):
            size = sum(sizes[number] for number, *_ in (*one, other[0]))
            assert len(one) == MAX_CALLS or size > FRAME_BYTES, "they were one frame"
    assert state.take() == []


def test_a_result_that_is_added_meanwhile_leaves_later() -> None:
    """What is added while frames are written is not lost, and does not leave twice."""
    state = ReplyState()
    for number in range(2):
        state.add((number, "plain", None), FRAME_BYTES, is_last=False)
    assert state.take() == [[(0, "plain", None)], [(1, "plain", None)]]
    assert state.add((2, "plain", None), 0, is_last=True)
    assert state.take() == [[(2, "plain", None)]]
    assert state.take() == []


# ── the window of unanswered calls ────────────────────────────────────────────────────────────────


sizes = st.one_of(st.integers(0, 60), st.integers(0, 1000))


class Window(RuleBasedStateMachine):
    """A model that keeps the sizes of unanswered calls."""

    @initialize(calls=st.integers(1, 5), size=st.integers(1, 200))
    def bounds(self, calls: int, size: int) -> None:
        self.calls = calls
        self.bytes = size
        self.window = FlowWindow(calls, size)
        self.open: dict[int, int] = {}
        self.answers = 0
        self.next = 0
        self.forced: set[int] = set()  # sent although the window was full

    def send(self, size: int) -> None:
        self.window.sent(self.next, size)
        self.open[self.next] = size
        self.next += 1

    @rule(size=sizes)
    def call(self, size: int) -> None:
        """Admitted calls stay within the bounds; a single call is always admitted."""
        was_empty = not self.open
        if self.window.admits(size):
            self.send(size)
            if not self.forced:
                assert len(self.open) <= self.calls
                assert was_empty or sum(self.open.values()) <= self.bytes
        else:
            full = len(self.open) >= self.calls or sum(self.open.values()) + size > self.bytes
            assert not was_empty
            assert full

    @rule(size=sizes)
    def trickle(self, size: int) -> None:
        """A call that is sent into a full window counts as any other."""
        if not self.window.admits(size):
            self.forced.add(self.next)
        self.send(size)

    @rule(which=st.integers(0, 20))
    def answer(self, which: int) -> None:
        """An answer releases a call once; an unknown answer releases nothing."""
        number = self.next - 1 - which
        self.answers += self.open.pop(number, None) is not None
        self.forced.discard(number)
        self.window.answered((number, number))
        assert number not in self.window

    @rule()
    def lose(self) -> None:
        """Every unanswered call is returned, in the order of sending."""
        assert self.window.release_all() == [*self.open]
        self.open.clear()
        self.forced.clear()

    @invariant()
    def it_holds_what_is_open(self) -> None:
        """The window counts calls, bytes and answers; an empty window admits any call."""
        if not hasattr(self, "window"):
            return
        assert len(self.window) == len(self.open)
        assert repr(self.window) == f"<Window {len(self.open)} calls, {self._total()} bytes>"
        assert self.window.answers == self.answers
        assert all(number in self.window for number in self.open)
        assert self.next not in self.window
        if not self.open:
            assert self.window.admits(10**12)

    def _total(self) -> int:
        return sum(self.open.values())

    def teardown(self) -> None:
        """Sizes balance."""
        if hasattr(self, "window"):
            self.window.answered(self.open)
            assert repr(self.window) == "<Window 0 calls, 0 bytes>"


TestWindow = Window.TestCase
TestWindow.settings = settings(stateful_step_count=25)


def test_a_single_call_may_have_any_size() -> None:
    """A call larger than the window is sent if no other is unanswered."""
    window = FlowWindow(4, 100)
    assert window.admits(10**9)
    window.sent(0, 10**9)
    assert not window.admits(0)
    window.answered([0])
    assert window.admits(10**9)


def test_the_bounds_are_reached() -> None:
    """Exactly so many calls, exactly so many bytes."""
    window = FlowWindow(2, 100)
    window.sent(0, 40)
    assert window.admits(60)
    assert not window.admits(61)
    window.sent(1, 0)
    assert not window.admits(0)


def test_the_credit_of_an_item() -> None:
    """One for a small item, and one more for each whole block of bytes."""
    sizes = [0, BYTES_PER_CREDIT - 1, BYTES_PER_CREDIT, 3 * BYTES_PER_CREDIT + 1]
    assert [credit_cost(size) for size in sizes] == [1, 1, 2, 4]


def test_a_lost_window_is_as_new() -> None:
    """After `release_all` all bytes are free again."""
    window = FlowWindow(4, 100)
    window.sent(0, 100)
    assert window.release_all() == [0]
    window.sent(1, 1)
    assert window.admits(99)
    assert not window.admits(100)
