"""Both ends of a connection, without sockets and without torch RPC: calls, copies and answers.

Frames are really encoded and decoded; what travels by torch RPC arrives in any order.
"""

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from aiorpc_torch._wire.columns import FAILED, HELD, HeldResult, encode_cell
from aiorpc_torch._wire.connection_state import FlowWindow, ReplyState, SendState
from aiorpc_torch._wire.exceptions import RemoteFailure
from aiorpc_torch._wire.frames import CALLS, CONTROL, SHARED, SLOT
from aiorpc_torch._wire.messages import (
    CallHead,
    EncodedCall,
    Group,
    HeadCache,
    decode_reply,
    dump_payload,
    encode_call,
    encode_calls,
    encode_reply,
    load_payload,
)
from aiorpc_torch._wire.plain import dump, reader
from aiorpc_torch._wire.slots import MAX_CLOSED, UNKNOWN_OBJECT, Slots
from aiorpc_torch._wire.targets import FunctionTarget, MethodTarget, order_key
from aiorpc_torch._wire.tensor_table import TensorTable
from aiorpc_torch._wire.wire_targets import decode_target, encode_target
from tests.support.received_calls import load_calls

SESSION = "me", 1, 2
TARGETS: list[Any] = [
    MethodTarget((0, 1), "a"),
    MethodTarget((0, 1), "b"),
    MethodTarget((0, 2), "a"),
    FunctionTarget(functools.partial(max, 1)),  # of an unknown object
]
INDICES = st.integers(0, 1000)
FAILURE = RemoteFailure.of(ValueError("cancelled"), "callee")

read_control = reader(tuple[list[int], list[tuple[int, int]]])
read_slot = reader(tuple[int, tuple[int, int] | str | None])


class Received:
    """A call at the callee, which came by torch or not; its only argument names it."""

    def __init__(self, number: int, key: Any, argument: Any, *, by_torch: bool) -> None:
        self.number, self.key, self.argument = number, key, argument
        self.by_torch = by_torch
        self.is_cancelled = False


class Callee:
    """What a session does with frames, without running anything."""

    def __init__(self) -> None:
        self.slots: Slots[Received] = Slots()
        self.replies = ReplyState()
        self.calls: dict[int, Received] = {}  # unanswered, started or not
        self.running: dict[int, Received] = {}
        self.started: list[Received] = []
        self.held: dict[int, Any] = {}
        self.sent: deque[tuple[bytes, TensorTable]] = deque()  # frames of results
        self.by_torch: list[tuple[str, int, Any]] = []  # answers of torch RPC

    def on_frame(self, kind: int, data: bytes, tensors: list[Tensor]) -> None:
        if kind == SLOT:
            number, key = read_slot(data)
            self.start(self.slots.open(number, key))
        elif kind == CONTROL:
            for number in read_control(data)[0]:
                self.cancel(number)
        else:
            assert kind in (CALLS, SHARED)
            calls = self.read(load_calls(data), tensors, by_torch=False)
            self.start([call for call in calls if self.slots.admit(call.key, call)])

    def read(self, groups: list[Group], tensors: list[Tensor], *, by_torch: bool) -> list[Received]:
        found, rest = [], iter(tensors)
        for group in groups:
            head = CallHead(group.head)
            target = decode_target(head.target, head.tensors_of_target(rest))
            for number, row in zip(group.numbers, head.rows(group, rest), strict=True):
                ((argument,), named) = row
                assert not named
                found.append(Received(number, order_key(target), argument, by_torch=by_torch))
        assert not [*rest]
        for call in found:
            assert call.number not in self.calls, "it came twice"
            self.calls[call.number] = call
        return sorted(found, key=lambda call: call.number)

    def on_payload(self, data: bytes, tensors: list[Tensor]) -> None:
        session, context, groups = load_payload(data)
        assert (session, context) == (SESSION, -1)
        (call,) = self.read(groups, tensors, by_torch=True)
        ready = self.slots.fill(call.number, call)
        if ready is None:
            self.end(call, [])
        else:
            self.start(ready)

    def start(self, calls: list[Received]) -> None:
        for call in calls:
            self.started.append(call)
            self.running[call.number] = call
            if call.is_cancelled:
                self.answer(call.number, "cancelled")

    def cancel(self, number: int) -> None:
        self.start(self.slots.drop(number))
        if (waiting := self.slots.take(number)) is not None:
            self.end(waiting, [])
        self.held.pop(number, None)
        if number in self.running:
            self.answer(number, "cancelled")
        elif number in self.calls:
            self.calls[number].is_cancelled = True

    def answer(self, number: int, how: str) -> None:
        """End a call that runs."""
        call = self.running.pop(number)
        value = call.argument
        result: Any = (number, *encode_cell(value))
        if how == "cancelled":
            result = number, FAILED, FAILURE
        elif how == "held" and not call.by_torch:
            self.held[number] = result
            result = number, HELD, 5
        self.end(call, [result])

    def end(self, call: Received, results: list[Any]) -> None:
        del self.calls[call.number]
        if call.by_torch:
            self.by_torch.append(("payload", call.number, encode_reply(results)))
            return
        for result in results:
            if self.replies.add(result, 100, is_last=not self.calls):
                self.flush()

    def flush(self) -> None:
        self.sent += map(encode_reply, self.replies.take())

    def collect(self, number: int) -> None:
        found = self.held.pop(number, None)
        answer = encode_reply([] if found is None else [found])
        self.by_torch.append(("collect", number, answer))


class BothEnds(RuleBasedStateMachine):
    """A caller that does what a connection does, and what it may rely on."""

    @initialize(calls=st.sampled_from([1, 2, 5, 1 << 20]))
    def begin(self, calls: int) -> None:
        self.pending: dict[int, Any] = {}  # by number: what its answer must be
        self.window = FlowWindow(calls, 1 << 40)
        self.heads = HeadCache()
        self.targets: list[Any] = []  # by number
        self.state: SendState[EncodedCall] = SendState(
            self.pending, self.window, self.drop, lambda call: order_key(self.targets[call.number])
        )
        self.state.is_paused = False
        self.frames: deque[tuple[int, bytes, list[Tensor]]] = deque()
        self.payloads: list[tuple[bytes, list[Tensor]]] = []
        self.collecting: list[int] = []
        self.copying: list[tuple[EncodedCall, bytes, list[Tensor]]] = []
        self.shared: dict[int, tuple[bytes, list[Tensor]]] = {}
        self.fails: Iterator[bool] = iter(())
        self.taken: set[int] = set()  # whose frame was written
        self.withdrawn: set[int] = set()  # cancelled before
        self.dropped: list[int] = []
        self.callee = Callee()

    def drop(self, call: EncodedCall) -> None:
        assert call.number in self.withdrawn
        self.dropped.append(call.number)

    # ── the caller ──────────────────────────────────────────────────────────────────────────────

    @rule(
        calls=st.lists(
            st.tuples(
                st.integers(0, len(TARGETS) - 1),
                st.sampled_from(["small", "small", "packed", "large", "large", "by torch"]),
            ),
            min_size=1,
            max_size=6,
        ),
        fails=st.lists(st.booleans(), max_size=3),
    )
    def submit(self, calls: list[tuple[int, str]], fails: list[bool]) -> None:
        """Calls of one iteration, whose only argument is their number."""
        for index, kind in calls:
            number = len(self.targets)
            self.targets.append(TARGETS[index])
            value: Any = number if kind == "small" else [number]
            if kind in ("large", "by torch"):
                value = torch.tensor([float(number)], requires_grad=True)
            target = encode_target(TARGETS[index], TARGETS[index].on)
            call = encode_call(self.heads, number, target, False, ((value,), {}), None)
            assert call.is_large == (kind in ("large", "by torch"))
            call.by_torch = kind == "by torch"
            is_idle = not self.pending
            self.pending[number] = value
            if self.state.submit(call, is_idle=is_idle):
                self.flush(fails)
        self.flush(fails)

    @rule(fails=st.lists(st.booleans(), max_size=3))
    def flush(self, fails: list[bool]) -> None:
        """Write what may be sent; some copies cannot begin."""
        self.fails = iter(fails)
        if (controls := self.state.controls()) is not None:
            self.frames.append((CONTROL, dump(controls), []))
        while calls := self.state.take():
            if calls[0].is_large:
                self.send_large(calls[0])
            else:
                self.write(CALLS, calls)

    def encode(self, calls: list[EncodedCall]) -> tuple[Any, TensorTable]:
        tensors = TensorTable()
        return encode_calls(calls, 0.0, tensors), tensors

    def write(self, kind: int, calls: list[EncodedCall]) -> None:
        groups, tensors = self.encode(calls)
        assert not tensors
        self.frames.append((kind, dump(groups), []))
        self.note_taken(calls)

    def note_taken(self, calls: list[EncodedCall]) -> None:
        for call in calls:
            assert call.number in self.pending, "a call that was cancelled unsent"
            assert call.number not in self.taken
            self.taken.add(call.number)

    def send_large(self, call: EncodedCall) -> None:
        if call.number in self.shared:
            self.frames.append((SHARED, *self.shared.pop(call.number)))
            self.note_taken([call])
        elif call.by_torch:
            key = order_key(self.targets[call.number])
            self.frames.append((SLOT, dump((call.number, key)), []))
            groups, tensors = self.encode([call])
            self.payloads.append((dump_payload(SESSION, -1, groups), tensors))
            self.note_taken([call])
        else:
            self.state.begin_copy(call, self.state._object_of(call))
            if not next(self.fails, False):
                groups, tensors = self.encode([call])
                self.copying.append((call, dump(groups), tensors))
                return
            self.state.stop_copy(call)
            call.by_torch = True
            if not self.state.hold_back(call):
                self.send_large(call)

    def end_copy(self, which: int, fails: bool) -> None:
        """The tensors are in shared memory, or cannot be."""
        if self.copying:
            call, data, tensors = self.copying.pop(which % len(self.copying))
            if fails:
                call.by_torch = True
            if self.state.end_copy(call):
                if not fails:
                    self.shared[call.number] = data, tensors
                self.flush([])

    @rule(is_paused=st.booleans(), trickles=st.booleans())
    def pause(self, is_paused: bool, trickles: bool) -> None:
        """The socket is full, or takes more; no answer has come for long."""
        self.state.is_paused, self.state.must_admit = is_paused, trickles

    @rule(which=INDICES)
    def cancel(self, which: int) -> None:
        """A caller does not wait any more."""
        if self.pending:
            number = [*self.pending][which % len(self.pending)]
            del self.pending[number]
            if number not in self.taken:
                self.withdrawn.add(number)
                self.shared.pop(number, None)
            assert self.state.cancel(number) is (number in self.taken)

    @rule(steps=st.lists(st.tuples(st.integers(0, 7), INDICES), min_size=1, max_size=20))
    def go_on(self, steps: list[tuple[int, int]]) -> None:
        """Frames and messages arrive, calls and copies end."""
        for step, which in steps:
            match step:
                case 0 | 1:
                    self.deliver(1 + which % 3)
                case 2:
                    self.deliver_payload(which)
                case 3:
                    self.end_copy(which, fails=which % 4 == 0)
                case 4 | 5:
                    self.answer(which, "held" if which % 4 == 0 else "value")
                case 6:
                    self.callee.flush()
                    self.deliver_results()
                case 7:
                    self.deliver_request(which)
                    self.deliver_answer(which)

    # ── what arrives ────────────────────────────────────────────────────────────────────────────

    def deliver(self, count: int) -> None:
        """Frames arrive in order."""
        for _ in range(min(count, len(self.frames))):
            kind, data, tensors = self.frames.popleft()
            self.callee.on_frame(kind, data, tensors)

    def deliver_payload(self, which: int) -> None:
        """A message of torch RPC arrives, before or after the frame of its slot."""
        if self.payloads:
            self.callee.on_payload(*self.payloads.pop(which % len(self.payloads)))

    def deliver_request(self, which: int) -> None:
        """The request for a held result arrives."""
        if self.collecting:
            self.callee.collect(self.collecting.pop(which % len(self.collecting)))

    def answer(self, which: int, how: str) -> None:
        """A call ends, and its result is a value or is held."""
        if self.callee.running:
            numbers = [*self.callee.running]
            self.callee.answer(numbers[which % len(numbers)], how)

    def deliver_results(self) -> None:
        """A frame of results arrives."""
        if self.callee.sent:
            data, tensors = self.callee.sent.popleft()
            for number, value in decode_reply(data, tensors):
                if not isinstance(value, HeldResult):
                    self.resolve(number, value)
                elif number in self.pending:
                    self.collecting.append(number)
                else:
                    self.window.answered((number,))
                    self.state.cancels.append(number)

    def deliver_answer(self, which: int) -> None:
        """An answer of torch RPC arrives."""
        if self.callee.by_torch:
            _, number, answer = self.callee.by_torch.pop(which % len(self.callee.by_torch))
            results = decode_reply(*answer)
            assert results or number not in self.pending, "nothing came for a call that waits"
            self.window.answered((number,))
            for _, value in results:
                self.resolve(number, value)

    def resolve(self, number: int, value: Any) -> None:
        """Check that a call that waits gets its own answer; it waits no more."""
        self.window.answered((number,))
        if number in self.pending:
            expected = self.pending.pop(number)
            assert type(value) is type(expected)
            assert value == expected if not isinstance(value, Tensor) else value[0] == number

    # ── what must be so ─────────────────────────────────────────────────────────────────────────

    @invariant()
    def calls_start_in_order(self) -> None:
        """Those of one object; none that was withdrawn; none before one of an unknown object."""
        if not hasattr(self, "state"):
            return
        started = [call.number for call in self.callee.started]
        assert len({*started}) == len(started)
        assert not self.withdrawn & {*started}
        for key in {call.key for call in self.callee.started}:
            of_key = [call.number for call in self.callee.started if call.key == key]
            assert of_key == sorted(of_key)
        unknown = [
            number
            for number, target in enumerate(self.targets)
            if order_key(target) is UNKNOWN_OBJECT
            and number in self.pending
            and number not in started
        ]
        assert not unknown or max(started, default=-1) < unknown[0]

    def teardown(self) -> None:
        """When all that is on its way has arrived, every caller has its answer."""
        if not hasattr(self, "state"):
            return
        self.state.is_paused = self.state.must_admit = False
        for _ in range(4 * len(self.targets) + 8):
            self.flush([])
            self.drain()
        assert not self.pending, "a caller waits for ever"
        assert len(self.state) == len(self.window) == self.window.size == 0
        assert not (self.state._admitted)
        assert not (self.shared)
        assert not (self.state.controls())
        assert {*self.dropped} <= self.withdrawn
        assert len({*self.dropped}) == len(self.dropped), "one was dropped twice"
        callee = self.callee
        assert not (callee.calls)
        assert not (callee.running)
        assert not (callee.held)
        assert not (callee.replies.results)
        for slots in (self.state._copies, callee.slots):
            assert not (slots.queues)
            assert not (slots.unfilled)
            assert not (slots._early)

    def drain(self) -> None:
        while self.copying:
            self.end_copy(0, fails=False)
        while self.frames:
            self.deliver(1)
        for step, waiting in (
            (self.deliver_payload, self.payloads),
            (self.deliver_request, self.collecting),
        ):
            while waiting:
                step(0)
        while self.callee.running:
            self.answer(0, "value")
        self.callee.flush()
        while self.callee.sent:
            self.deliver_results()
        while self.callee.by_torch:
            self.deliver_answer(0)


TestBothEnds = BothEnds.TestCase
TestBothEnds.settings = settings(stateful_step_count=40)


def test_another_thread_may_ask_for_the_number() -> None:
    """Queues come and go on the loop meanwhile."""
    slots: Slots[str] = Slots()

    class Changing(deque[Any]):
        """A queue of which another thread asks the length, while the loop begins another one."""

        def __len__(self) -> int:
            slots.queues.setdefault("new", deque())
            return super().__len__()

    slots.queues["old"] = Changing(["first", "second"])
    assert len(slots) == 2


def test_what_is_taken_was_filled() -> None:
    """An open slot has nothing to take; what is behind it starts without what was taken."""
    slots: Slots[str] = Slots()
    assert slots.open(1, "a") == slots.open(2, "a") == []
    assert slots.fill(2, "second") == []
    assert slots.take(1) is None
    assert slots.take(2) == "second"
    assert slots.take(2) is None
    assert slots.fill(1, "first") == ["first"]
    assert not slots


def test_an_early_payload_waits_for_those_before_it() -> None:
    """It has come before its slot; then it follows the calls of its object, by its number."""
    slots: Slots[str] = Slots()
    assert slots.open(1, "a") == slots.fill(2, "second") == slots.fill(3, "other") == []
    assert slots.open(2, "a") == []
    assert slots.open(3, "b") == ["other"]
    assert slots.held() == ["second"]
    assert slots.fill(1, "first") == ["first", "second"]
    assert not slots


def test_the_latest_closed_numbers_are_remembered() -> None:
    """The payload of an older one counts as one that is early."""
    slots: Slots[str] = Slots()
    for number in range(MAX_CLOSED + 1):
        slots.open(number, number)
        assert slots.fill(number, "payload") == ["payload"]
    assert slots.fill(1, "again") is None
    assert slots.fill(0, "again") == []
