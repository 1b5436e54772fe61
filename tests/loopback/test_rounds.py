"""Rounds in a world of one: members, quorum, timeout, and contributors that give up."""

import asyncio
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    BatchContractError,
    Broadcast,
    CallTimeout,
    Fill,
    Round,
    RoundTimeout,
    RRef,
    batched,
    remote,
)
from aiorpc_torch.observe import stats
from tests.support.gated_batches import arrived, asks, by_name, cancel, outcome, raises, settled

# ── in a world of one ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("rounds.member")
async def test_a_members_second_contribution_waits_for_the_next_round(gated: Any) -> None:
    """And a round that raises raises for all of it, and for none of the next."""
    made, far = gated(Round(2, member=by_name))
    calls = asks(far, "a1", "a2")
    await arrived(far)
    assert made.batches == []
    calls += asks(far, "b1")
    assert await settled(calls[0], calls[2]) == ["a1", "b1"]
    made.answer = raises(LookupError("the step"))
    calls += asks(far, "b2")
    assert [type(each) for each in await settled(calls[1], calls[3])] == [LookupError] * 2
    made.answer = list
    assert await settled(*asks(far, "a3", "b3")) == [["a3", "b3"]] * 2
    assert made.batches == [["a1", "b1"], ["a2", "b2"], ["a3", "b3"]]


@pytest.mark.promise("rounds.leave")
async def test_a_contributor_that_gives_up_leaves_the_round(gated: Any) -> None:
    """By cancellation or because its time is over; the others wait for another."""
    made, far = gated(Round(2))
    calls = asks(far, "cancelled")
    await arrived(far)
    await cancel(far, *calls)
    late = await settled(remote(RRef(made), timeout=0.05).ask("late"))
    assert type(late[0]) is CallTimeout
    calls = asks(far, "a")
    await arrived(far)
    assert made.batches == []
    assert await settled(*calls, far.ask("b")) == ["a", "b"]


@pytest.mark.promise("rounds.timeout")
async def test_a_round_that_times_out_names_who_is_missing(
    gated: Any, skip: Callable[[float], None]
) -> None:
    """Its contributors are told who was there and who was not; nothing ran, and the next works."""
    made, far = gated(Round(3, timeout=1000.0, member=by_name))
    assert await settled(*asks(far, "a1", "b1", "c1")) == ["a1", "b1", "c1"]
    calls = asks(far, "a2", "b2", "a3")
    await arrived(far)
    skip(1001.0)
    got = await settled(*calls[:2])
    for told in got:
        assert type(told) is RoundTimeout
        assert (told.present, told.missing) == (("a", "b"), ("c",))
        assert "Made.ask timed out: a, b contributed; missing: c" in str(told)
    assert got[0] is not got[1]
    assert not calls[2].done()  # of the next round
    assert await settled(calls[2], *asks(far, "b3", "c3")) == ["a3", "b3", "c3"]
    assert made.batches == [["a1", "b1", "c1"], ["a3", "b3", "c3"]]


async def test_a_round_without_members_names_workers(
    gated: Any, skip: Callable[[float], None]
) -> None:
    """A round of fewer callers than it wants ends with its timeout, not never."""
    made, far = gated(Round(100, timeout=1000.0))
    calls = asks(far, 1, 2)
    await arrived(far)
    skip(1001.0)
    for told in await settled(*calls):
        assert (told.present, told.missing) == (("main", "main"), ())
        assert "missing: unknown (no other member" in str(told)
    assert made.batches == []


class Member:
    """Cannot be pickled, or not be read again, or cannot even be described."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __repr__(self) -> str:
        if self.fault == "no repr":
            raise ValueError(self.fault)
        return f"<Member with {self.fault}>"

    def __reduce__(self) -> Any:
        if self.fault == "no pickle":
            raise TypeError(self.fault)
        if self.fault == "exit":
            raise SystemExit(3)
        return _unreadable, ()


def _unreadable() -> None:
    raise LookupError("cannot be read")


@pytest.mark.parametrize("fault", ["no pickle", "exit", "no way back", "no repr"])
async def test_members_that_cannot_be_sent_arrive_as_text(
    gated: Any, skip: Callable[[float], None], fault: str
) -> None:
    """RoundTimeout arrives as itself, with the reprs of such members among the others."""
    members: dict[str, Any] = {"odd": Member(fault), "other": Member(fault), "fine": ("f", 1)}
    made, far = gated(Round(3, timeout=1000.0, member=lambda item, _: members[item]))
    assert await settled(*asks(far, *members)) == [*members]
    calls = asks(far, "odd", "fine")
    await arrived(far)
    calls.append(asyncio.create_task(outcome(made.ask("odd"))))
    await arrived(far)
    skip(1001.0)
    (told, same) = await settled(*calls[:2])
    texts = [
        object.__repr__(member) if fault == "no repr" else repr(member)
        for member in (members["odd"], members["other"])
    ]
    for each in (told, same):
        assert type(each) is RoundTimeout
        assert (each.present, each.missing) == ((texts[0], ("f", 1)), (texts[1],))
        assert "a round of " in str(each)
    skip(1001.0)
    (here,) = await settled(calls[2])
    assert (here.present, here.missing) == ((members["odd"],), (("f", 1), members["other"]))


def test_a_round_timeout_crosses_with_all_that_it_has() -> None:
    """Its notes and whatever a program put on it."""
    sent = RoundTimeout("over", ["a"], [Member("no pickle"), 3])
    sent.add_note("noted")
    sent.extra = 7  # type: ignore[attr-defined]
    read = pickle.loads(pickle.dumps(sent))
    assert (type(read), read.args, read.present) == (RoundTimeout, ("over",), ("a",))
    assert read.missing == ("<Member with no pickle>", 3)
    assert (read.__notes__, read.extra) == (["noted"], 7)


@pytest.mark.promise("rounds.quorum")
async def test_a_quorum_is_enough_once_the_time_is_over(
    gated: Any, skip: Callable[[float], None]
) -> None:
    """Not before; and the time of the next round begins when the one before has ended."""
    made, far = gated(Round(3, quorum=2, timeout=1000.0, member=by_name))
    calls = asks(far, "a1", "b1", "b2")
    await arrived(far)
    assert made.batches == []
    made.gate.clear()
    skip(1001.0)
    await arrived(far)
    assert made.batches == [["a1", "b1"]]
    calls += asks(far, "a2")
    await arrived(far)
    skip(1001.0)
    made.gate.set()
    assert await settled(*calls[:2]) == ["a1", "b1"]
    await arrived(far)
    assert made.batches == [["a1", "b1"]]  # c may wait for that answer still
    skip(1001.0)
    assert await settled(*calls[2:]) == ["b2", "a2"]


# ── results ───────────────────────────────────────────────────────────────────────────────────────


FOR_ALL = {
    "tensor": torch.arange(3.0),
    "list": [1, 2, 3],
    "tuple": (1, 2),
    "dict": {"weights": torch.ones(3, 2)},
    "none": None,
    "text": "abc",
    "object": SimpleNamespace(rows=3),
}


@pytest.mark.promise("rounds.for_all")
@pytest.mark.parametrize("stack", [False, True], ids=["lists", "stacked"])
@pytest.mark.parametrize("result", FOR_ALL.values(), ids=FOR_ALL)
async def test_what_a_round_returns_is_for_all(
    world: aiorpc.types.Worker, result: Any, stack: bool
) -> None:
    """Whatever it is, also if it could be dealt out: three weights for three trainers."""

    class Server:
        @batched(Round(3), stack=stack)
        def update(self, gradients: Any) -> Any:
            return result

    here = Server()
    far = remote(RRef(here))
    got = await settled(*(far.update(float(each)) for each in range(3)))
    got += await settled(*(here.update(float(each)) for each in range(3)))
    assert [repr(each) for each in got] == [repr(result)] * 6


@pytest.mark.promise("rounds.for_all")
async def test_each_gives_one_result_to_each(gated: Any) -> None:
    """Values, the rows of a tensor and exceptions, in the order of arrival."""
    made, far = gated(Round(3), answer=lambda items: aiorpc.each(torch.tensor(items)))
    assert [int(row) for row in await settled(*asks(far, 1, 2, 3))] == [1, 2, 3]
    made.answer = lambda items: aiorpc.each([items[0], LookupError("two"), items[2]])
    first, second, third = await settled(*asks(far, 1, 2, 3))
    assert (first, str(second), third) == (1, "two", 3)
    made.answer = lambda items: aiorpc.each(items[:2])
    for told in await settled(*asks(far, 1, 2, 3)):
        assert type(told) is BatchContractError
        assert "got a batch of 3 and returned 2 results" in str(told)


async def test_rows_of_each_are_tensors_of_their_own(world: aiorpc.types.Worker) -> None:
    """A local caller may change its row, and keeps no other alive."""

    class Server:
        @batched(Round(2))
        async def rows(self, items: list[int]) -> Any:
            return aiorpc.each(torch.zeros(2, 3))

    here = Server()
    one, other = await settled(here.rows(0), here.rows(1))
    one.fill_(1.0)
    assert other.tolist() == [0.0] * 3
    assert one.untyped_storage().nbytes() == 12


async def test_an_exception_instance_is_raised_for_all(gated: Any) -> None:
    """Each caller has its own."""
    _, far = gated(Round(2), answer=lambda items: LookupError("over"))
    one, other = await settled(*asks(far, 1, 2))
    assert str(one) == str(other) == "over"
    assert one is not other


async def test_a_broadcast_of_a_round_is_its_value(gated: Any) -> None:
    """It says twice what a round does."""
    _, far = gated(Round(2), answer=Broadcast)
    assert await settled(*asks(far, 1, 2)) == [[1, 2]] * 2


async def test_a_barrier(world: aiorpc.types.Worker) -> None:
    """A method without parameters and without a result."""

    class Barrier:
        passed = 0

        @batched(Round(lambda self: 3))
        def wait(self) -> None:
            self.passed += 1

    barrier = Barrier()
    far = remote(RRef(barrier))
    waiting = [asyncio.create_task(outcome(far.wait())) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    assert await settled(*waiting, far.wait()) == [None] * 3
    assert barrier.passed == 1


# ── numbers of the object ─────────────────────────────────────────────────────────────────────────


class Trainers:
    """A round of as many as there are trainers now."""

    def __init__(self, trainers: Any) -> None:
        self.trainers = trainers

    @batched(Round(lambda self: self.trainers, timeout=lambda self: 1000.0))
    async def update(self, items: list[int]) -> list[int]:
        return items

    @batched(max_size=lambda self: self.trainers, max_wait=lambda self: 1000.0)
    async def fill(self, items: list[int]) -> list[list[int]]:
        return [items] * len(items)


@pytest.mark.promise("batching.numbers")
@pytest.mark.parametrize("method", ["update", "fill"])
async def test_numbers_are_functions_of_the_object(world: aiorpc.types.Worker, method: str) -> None:
    """Each object has its own, and a change counts from the next call on."""
    few, many = Trainers(1), Trainers(3)
    ask, ask_many = getattr(remote(RRef(few)), method), getattr(remote(RRef(many)), method)
    assert await settled(ask(1)) == [[1]]
    waiting = [asyncio.create_task(outcome(ask_many(each))) for each in (1, 2)]
    assert await settled(ask(1)) == [[1]]
    assert not any(task.done() for task in waiting)
    many.trainers = 4
    waiting.append(asyncio.create_task(outcome(ask_many(3))))
    assert await settled(*waiting, ask_many(4)) == [[1, 2, 3, 4]] * 4
    waiting = [asyncio.create_task(outcome(ask_many(each))) for each in (1, 2)]
    assert await settled(ask(1)) == [[1]]
    many.trainers = 3
    assert await settled(*waiting, ask_many(3)) == [[1, 2, 3]] * 3
    name = f"Trainers.{method}"
    assert stats().batches[name].size == 1 or stats().batches[name].size == 3


@pytest.mark.parametrize(
    ("trainers", "error"),
    [
        (0, "size must be at least 1, got 0"),
        ("two", "size must be an int, got 'two'"),
        (None, "size must be an int, got None"),
    ],
)
async def test_an_invalid_number_is_its_callers_error(
    world: aiorpc.types.Worker, trainers: Any, error: str
) -> None:
    """The call raises, and the object goes on."""
    made = Trainers(trainers)
    for method in (remote(RRef(made)).update, remote(RRef(made)).fill):
        (told,) = await settled(method(1))
        assert isinstance(told, TypeError | ValueError)
        assert error in str(told)
    made.trainers = 1
    assert await settled(remote(RRef(made)).update(1)) == [[1]]


async def test_a_number_that_raises_is_its_callers_error(world: aiorpc.types.Worker) -> None:
    """As the function raised it."""
    made = Trainers(1)
    del made.trainers
    (told,) = await settled(remote(RRef(made)).update(1))
    assert type(told) is AttributeError


async def test_a_function_has_no_object(world: aiorpc.types.Worker) -> None:
    """Its numbers are numbers."""

    @batched(max_size=lambda self: 1)
    async def free(items: list[int]) -> list[int]:
        return items

    with pytest.raises(TypeError, match="is no method"):
        await free(1)


@pytest.mark.promise("batching.numbers")
async def test_a_function_that_returns_a_function(world: aiorpc.types.Worker) -> None:
    """It was to be called: its callers are told, and no call waits."""

    class Twice:
        @batched(max_size=lambda self: self.size)
        async def fill(self, items: list[int]) -> list[int]:
            return items

        def size(self) -> int:
            return 2

    made = Twice()
    for _ in range(2):
        (told,) = await settled(remote(RRef(made)).fill(1))
        assert isinstance(told, TypeError)
        assert "the function of max_size returned a function" in str(told)
    assert "Twice.fill" not in stats().batches or not stats().batches["Twice.fill"].items


class Slots:
    """Batches of one, as many at once as there are slots now; one call may wait."""

    def __init__(self) -> None:
        self.slots = 1
        self.begun: list[int] = []
        self.gate = asyncio.Event()

    @batched(Fill(1, max_concurrent_batches=lambda self: self.slots, max_pending=1))
    async def ask(self, items: list[int]) -> list[int]:
        self.begun += items
        await self.gate.wait()
        return items


@pytest.mark.promise("batching.numbers")
async def test_a_refused_call_renews_the_numbers(world: aiorpc.types.Worker) -> None:
    """A call that waits starts when there are more slots, whoever has seen them."""
    made = Slots()
    asking = [asyncio.ensure_future(made.ask(1))]
    await asyncio.sleep(0.01)
    asking.append(asyncio.ensure_future(made.ask(2)))
    await asyncio.sleep(0.01)
    assert made.begun == [1]
    made.slots = 2
    with pytest.raises(aiorpc.QueueFull):
        await made.ask(3)
    await asyncio.sleep(0.01)
    assert made.begun == [1, 2]
    made.gate.set()
    assert await asyncio.gather(*asking) == [1, 2]
