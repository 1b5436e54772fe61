"""Payloads that come by torch RPC: whatever their order, calls of one object start as sent."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from aiorpc_torch import RRef, remote
from aiorpc_torch._client import connection, pool, torch_transfers
from aiorpc_torch._endpoint import entry_points
from aiorpc_torch._wire.payloads import detach_data, message_for_torch
from aiorpc_torch._wire.slots import UNKNOWN_OBJECT, Slots
from aiorpc_torch.observe import stats
from tests.support.actors import Notes
from tests.support.raw_connections import server

ATTACHED = 64 * 1024  # bytes of data up to which it is not attached as a tensor

INDICES = st.integers(0, 1000)
KEYS = st.integers(0, 2)


# ── the order of calls ──────────────────────────────────────────────────────────────────────────


class Ordering(RuleBasedStateMachine):
    """A model that looks at every call that has not started, each time.

    A call starts once its item is there and no earlier call of its key or of `EVERY` waits.
    """

    objects: ClassVar[list[Any]] = ["a", "b", (0, 1)]

    @initialize()
    def begin(self) -> None:
        self.slots: Slots[str] = Slots()
        self.keys: dict[int, Any] = {}  # of all calls that were sent
        self.waiting: list[int] = []  # those that have not started, as they were sent
        self.there: set[int] = set()  # those whose item is there
        self.early: set[int] = set()  # payloads whose slot has not come
        self.over: list[int] = []  # slots that were filled or dropped
        self.number = 0

    def send(self, key: int) -> tuple[int, Any]:
        """The next call, and its key."""
        number, self.number = self.number, self.number + 1
        self.keys[number] = self.objects[key % len(self.objects)]
        self.waiting.append(number)
        return number, self.keys[number]

    def ready(self) -> list[int]:
        """Start what may start."""
        ready: list[int] = []
        left: list[int] = []
        blocked: set[Any] = set()
        for number in self.waiting:
            key = self.keys[number]
            if number in self.there and key not in blocked and UNKNOWN_OBJECT not in blocked:
                ready.append(number)
            else:
                left.append(number)
                blocked.add(key)
        self.waiting = left
        return ready

    def check(self, found: list[str] | None) -> None:
        """Compare what starts, in which order for each key."""
        assert found is not None
        expected = self.ready()
        numbers = [*map(int, found)]
        assert sorted(numbers) == sorted(expected)
        for key in self.objects:
            of_key = [number for number in numbers if self.keys[number] == key]
            assert of_key == [number for number in expected if self.keys[number] == key]

    @rule(key=KEYS)
    def call(self, key: int) -> None:
        """A call whose arguments are in its frame is held back, or starts."""
        if self.number in self.early:
            return
        number, key = self.send(key)
        self.there.add(number)
        found = [str(number)] if self.slots.admit(key, str(number)) else []
        self.check(found)

    @rule(key=KEYS)
    def slot(self, key: int) -> None:
        """A slot starts what came early for it, or waits."""
        number, key = self.send(key)
        if number in self.early:
            self.early.discard(number)
            self.there.add(number)
            self.over.append(number)
        self.check(self.slots.open(number, key))

    def an_open_slot(self, which: int) -> int | None:
        numbers = [number for number in self.waiting if number not in self.there]
        return numbers[which % len(numbers)] if numbers else None

    @rule(which=INDICES)
    def payload(self, which: int) -> None:
        """A payload starts its call, and what has waited for it alone."""
        if (number := self.an_open_slot(which)) is not None:
            self.there.add(number)
            self.over.append(number)
            self.check(self.slots.fill(number, str(number)))

    @rule(ahead=st.integers(0, 2))
    def early_payload(self, ahead: int) -> None:
        """A payload that is ahead of its slot is kept, once."""
        number = self.number + ahead
        found = self.slots.fill(number, str(number))
        assert found == (None if number in self.early else [])
        self.early.add(number)

    @rule(which=INDICES)
    def late_payload(self, which: int) -> None:
        """A payload is rejected if its slot was dropped or filled before."""
        if self.over:
            assert self.slots.fill(self.over[which % len(self.over)], "late") is None

    @rule(which=INDICES)
    def drop(self, which: int) -> None:
        """A dropped call holds no other call back."""
        if (number := self.an_open_slot(which)) is not None:
            self.waiting.remove(number)
            self.over.append(number)
            self.check(self.slots.drop(number))

    @rule(which=INDICES)
    def drop_a_started_call(self, which: int) -> None:
        """Dropping a started or dropped call starts no other."""
        over = [number for number in self.over if number not in self.waiting]
        if over:
            assert self.slots.drop(over[which % len(over)]) == []

    @invariant()
    def it_says_whether_anything_is_held(self) -> None:
        """Empty slots hold no call back."""
        if hasattr(self, "slots"):
            assert bool(self.slots) is bool(self.waiting)

    @rule()
    def close(self) -> None:
        """Payloads that have not started are returned, each once."""
        held = {number for number in self.waiting if number in self.there}
        assert sorted(map(int, self.slots.close())) == sorted(held | self.early)
        assert self.slots.close() == []
        assert repr(self.slots) == "<Slots 0 open, 0 payloads early>"
        self.begin()


class OrderingWithUnknownObjects(Ordering):
    """The same with calls of objects that cannot be told from others."""

    objects: ClassVar[list[Any]] = ["a", "b", UNKNOWN_OBJECT]


TestOrdering = Ordering.TestCase
TestOrdering.settings = settings(stateful_step_count=30)
TestOrderingWithUnknownObjects = OrderingWithUnknownObjects.TestCase
TestOrderingWithUnknownObjects.settings = settings(stateful_step_count=30)


@pytest.mark.promise("order.payload")
def test_calls_of_an_object_wait_for_its_payload() -> None:
    """Those of other objects do not."""
    slots: Slots[str] = Slots()
    assert slots.open(0, "a") == []
    assert not slots.admit("a", "1")
    assert slots.admit("b", "2")
    assert slots.fill(0, "0") == ["0", "1"]
    assert not slots


def test_payloads_start_in_the_order_of_their_slots() -> None:
    """Whichever is there first."""
    slots: Slots[str] = Slots()
    for number in range(3):
        assert slots.open(number, "a") == []
    assert slots.fill(2, "2") == []
    assert slots.fill(1, "1") == []
    assert slots.fill(0, "0") == ["0", "1", "2"]


def test_an_object_that_cannot_be_told_holds_back_all() -> None:
    """Calls of every key wait for its payload."""
    slots: Slots[str] = Slots()
    assert slots.open(0, UNKNOWN_OBJECT) == []
    assert not slots.admit("a", "1")
    assert not slots.admit(UNKNOWN_OBJECT, "2")
    assert slots.fill(0, "0") == ["0", "1", "2"]
    assert slots.admit("a", "3")


def test_an_earlier_payload_of_the_same_object_is_waited_for() -> None:
    """Even by a call that waits for an object that cannot be told as well."""
    slots: Slots[str] = Slots()
    slots.open(0, "a")
    slots.open(1, UNKNOWN_OBJECT)
    assert not slots.admit("a", "2")
    assert slots.fill(1, "1") == ["1"]
    assert slots.fill(0, "0") == ["0", "2"]


def test_a_slot_behind_such_an_object_holds_back_its_own() -> None:
    """Calls of other objects start once that object's payload is there."""
    slots: Slots[str] = Slots()
    slots.open(0, UNKNOWN_OBJECT)
    slots.open(1, "a")
    assert not slots.admit("b", "2")
    assert slots.fill(0, "0") == ["0", "2"]
    assert slots.admit("b", "3")
    assert not slots.admit("a", "4")
    assert slots.fill(1, "1") == ["1", "4"]


# ── data as a tensor ────────────────────────────────────────────────────────────────────────────


TENSORS = st.lists(st.integers(0, 5).map(lambda size: torch.arange(float(size))), max_size=3)


@given(st.binary(min_size=1, max_size=100) | st.integers(ATTACHED - 1, ATTACHED + 2).map(bytes))
def test_data_arrives_without_tensors(data: bytes) -> None:
    """Small or attached, it comes out as it was."""
    assert detach_data(*message_for_torch(data, [])) == (data, [])


@given(st.sampled_from([1, 100, ATTACHED, ATTACHED + 1, 1 << 20]), INDICES, TENSORS)
def test_data_and_tensors_arrive(size: int, first: int, tensors: list[Tensor]) -> None:
    """The tensors are the same objects, in their order; the list itself is not changed."""
    data = bytes((first + index) % 256 for index in range(min(size, 1000))).ljust(size, b"x")
    before = [*tensors]
    sent, table = message_for_torch(data, tensors)
    assert tensors == before
    assert len(table) - len(tensors) == (size > ATTACHED)
    assert len(sent) == (0 if size > ATTACHED else size)
    found, rest = detach_data(sent, table)
    assert found == data
    assert len(rest) == len(tensors)
    assert all(one is other for one, other in zip(rest, tensors, strict=True))


def test_attached_data_is_a_copy() -> None:
    """Changes of the received tensor do not change the bytes that were read."""
    data = bytes(ATTACHED + 1)
    sent, table = message_for_torch(data, [])
    received = [each.clone() for each in table]
    found, _ = detach_data(sent, received)
    received[0].fill_(1)
    assert found == data


# ── calls that are given up, in a world of one ──────────────────────────────────────────────────


class Held:
    """Payloads that do not leave until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.payloads: list[Callable[[], None]] = []
        self._answers: list[torch.futures.Future[Any]] = []
        self._send = torch_transfers.send
        monkeypatch.setattr(torch_transfers, "send", self.send)

    def send(self, peer: Any, endpoint: Any, data: bytes, tensors: Any = ()) -> Any:
        """Hold a payload back; anything else is sent."""
        if endpoint is not entry_points.payload:
            return self._send(peer, endpoint, data, tensors)
        answer: torch.futures.Future[Any] = torch.futures.Future()
        self._answers.append(answer)

        def leave() -> None:
            sent = self._send(peer, endpoint, data, tensors)
            sent.then(lambda done: answer.set_result(done.wait()))

        self.payloads.append(leave)
        return answer

    def are_answered(self) -> bool:
        """Whether every payload has its answer."""
        return all(answer.done() for answer in self._answers)


def own_connection() -> connection.Connection:
    """The connection of this loop to its own worker."""
    return pool.current().connection("main")


def open_slots() -> int:
    """How many slots of that connection wait for their payload."""
    return len(server().sessions[own_connection().key].dispatcher.slots.unfilled)


async def until(condition: Callable[[], bool]) -> None:
    """Turns of the loop until it is so."""
    async with asyncio.timeout(30.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.usefixtures("over_torch", "world")
async def test_a_cancelled_payload_leaves_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is cancelled before its payload is there does not fill the window for ever."""
    notes = remote(RRef(Notes()))
    await notes.note(0)
    held = Held(monkeypatch)
    call = asyncio.ensure_future(notes.note(b"x" * 2 * ATTACHED))
    await until(lambda: open_slots() == 1)
    assert len(own_connection().state.window) == 1
    call.cancel()
    await asyncio.wait((call,))
    assert await notes.noted() == [0]  # the cancellation has left before
    held.payloads[0]()
    await until(held.are_answered)
    await until(lambda: len(own_connection().state.window) == 0)
    assert stats().in_flight == 0


@pytest.mark.promise("deadlines.cancelled_slot")
@pytest.mark.usefixtures("over_torch", "world")
async def test_a_cancelled_call_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its payload is there and waits behind another's when it is cancelled."""
    notes = Notes()
    mine = remote(RRef(notes))
    await mine.note(0)
    held = Held(monkeypatch)
    first, second = b"a" * 2 * ATTACHED, b"b" * 2 * ATTACHED
    calls = [asyncio.ensure_future(mine.note(each)) for each in (first, second)]
    await until(lambda: open_slots() == 2)
    held.payloads[1]()
    await until(lambda: open_slots() == 1)
    calls[1].cancel()
    await asyncio.wait(calls[1:])
    await remote(RRef(Notes())).noted()  # another object's: the cancellation has come before
    held.payloads[0]()
    await calls[0]
    await until(held.are_answered)
    await mine.note(1)
    assert [each == second for each in notes.order] == [False] * 3
    await until(lambda: len(own_connection().state.window) == 0)
