"""`@batched` from end to end: through `remote` and `call`, with real pickling and threads."""

import asyncio
import collections
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    BatchContractError,
    Broadcast,
    NotInWorld,
    QueueFull,
    RemoteError,
    Round,
    RRef,
    batched,
    call,
    remote,
)
from aiorpc_torch.observe import BatchStats, stats
from aiorpc_torch.types import RemoteTraceback
from tests.support import actors
from tests.support.gated_batches import (
    Gated,
    arrived,
    asks,
    by_name,
    cancel,
    new_gated,
    outcome,
    raises,
    settled,
)

# ── who is in a batch ───────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("batching.late_binding")
async def test_members_are_chosen_when_a_slot_is_free(gated: Any) -> None:
    """Calls that came while the function was busy form full batches, not those of its start."""
    made, far = gated(max_size=4, max_wait=0.01)
    made.gate.clear()
    calls = asks(far, *range(4))
    for item in range(4, 11):
        await arrived(far)
        calls += asks(far, item)
    await arrived(far)
    assert made.batches == [[0, 1, 2, 3]]
    made.gate.set()
    assert await settled(*calls) == [*range(11)]
    assert made.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


class Turns:
    """Notes its batches, and what the loop does between them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @batched(max_size=1)
    async def note(self, items: list[int]) -> list[int]:
        self.seen += items
        asyncio.get_running_loop().call_soon(self.seen.append, "another")
        return items

    @batched(max_size=2)
    async def wait(self, items: list[int]) -> list[int]:
        self.seen.append(asyncio.current_task())
        await asyncio.sleep(0)
        assert asyncio.current_task() is self.seen[-1]
        return items


async def test_the_loop_breathes_between_batches() -> None:
    """A function that does not wait starves no caller, whether its task starts at once or not."""
    async with aiorpc.local_world(0):
        turns = Turns()
        far = remote(RRef(turns))
        await far.note(-1)  # the connection is open
        await asyncio.sleep(0)
        turns.seen.clear()
        assert await settled(*(asyncio.ensure_future(far.note(n)) for n in range(8))) == [*range(8)]
        assert turns.seen[:15] == [each for n in range(8) for each in (n, "another")][:15]


async def test_a_function_that_waits_has_a_task_of_its_own() -> None:
    """From its first step, whoever took that."""
    async with aiorpc.local_world(0):
        turns = Turns()
        far = remote(RRef(turns))
        await far.note(-1)  # the connection is open
        await asyncio.sleep(0)
        turns.seen.clear()
        for n in range(3):
            assert await far.wait(n) == n
        assert len({*turns.seen}) == 3


@pytest.mark.promise("batching.timer")
async def test_the_timer_is_the_oldest_living_ones(
    gated: Any, skip: Callable[[float], None]
) -> None:
    """When the oldest gives up, the next one's own arrival counts."""
    made, far = gated(max_size=9, max_wait=1000.0)
    (oldest,) = asks(far, "oldest")
    await arrived(far)
    skip(600.0)
    (second,) = asks(far, "second")
    await arrived(far)
    await cancel(far, oldest)
    skip(600.0)  # the oldest's time would be over
    await arrived(far)
    assert made.batches == []
    skip(400.0)
    assert await settled(second) == ["second"]


@pytest.mark.promise("batching.leave")
async def test_a_cancelled_call_never_counts(gated: Any) -> None:
    """Of three, two give up: it takes three more to fill a batch of four."""
    made, far = gated(max_size=4, max_wait=1000.0)
    calls = asks(far, 0, 1, 2)
    await arrived(far)
    await cancel(far, *calls[1:])
    calls = [calls[0], *asks(far, 3, 4)]
    await arrived(far)
    assert made.batches == []
    calls += asks(far, 5)
    assert await settled(*calls) == [0, 3, 4, 5]
    assert made.batches == [[0, 3, 4, 5]]


async def test_cancelled_in_flight(gated: Any) -> None:
    """The batch that runs keeps its member and its others their answers; the queue goes on."""
    made, far = gated(max_size=3)
    made.gate.clear()
    calls = asks(far, 0, 1, 2)
    await arrived(far)
    await cancel(far, calls[1])
    made.gate.set()
    assert await settled(calls[0], calls[2], far.ask(3)) == [0, 2, 3]
    assert made.batches == [[0, 1, 2], [3]]


# ── what a function does ───────────────────────────────────────────────────────────────────────


ADDRESSED = [asyncio.CancelledError("x"), SystemExit(3), KeyboardInterrupt("x"), GeneratorExit("x")]


@pytest.mark.promise("batching.raises")
@pytest.mark.parametrize("exc", ADDRESSED, ids=repr)
async def test_a_function_that_raises_cancelled_error_answers_everybody(
    gated: Any, exc: BaseException
) -> None:
    """So with whatever would end a caller's task or process; later calls are served."""
    made, far = gated(max_size=3, answer=raises(exc))
    got = await settled(*asks(far, 1, 2, 3))
    assert [type(each) for each in got] == [RemoteError] * 3
    assert all(type(exc).__name__ in str(each) for each in got)
    made.answer = list
    assert await settled(far.ask(4)) == [4]


WRONG = {
    "a str": "no",
    "bytes": b"no",
    "a dict of its length": {1: 1, 2: 2},
    "a dict of lists": {"a": [1, 2], "b": [3, 4]},
    "None": None,
    "a set": {1, 2},
    "an array without dimensions": np.zeros(()),
    "an array that is too long": np.zeros((3, 2)),
    "a tensor without dimensions": torch.tensor(1.0),
    "too few": [1],
    "too many": torch.zeros(3, 2),
    "columns of two lengths": {"a": torch.zeros(2), "b": torch.zeros(3)},
    "no columns": {},
}


@pytest.mark.promise("batching.contract")
@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
async def test_a_wrong_result_fails_every_caller(gated: Any, answer: Any) -> None:
    """Nobody gets a key, a character or somebody else's result; the error names the function."""
    _, far = gated(max_size=2, answer=lambda items: answer)
    got = await settled(*asks(far, 1, 2))
    assert [type(each) for each in got] == [BatchContractError] * 2
    assert all("Made.ask got a batch of 2 and returned" in str(each) for each in got)


@pytest.mark.promise("batching.own_exception")
async def test_an_exception_among_the_answers_is_its_callers_alone(gated: Any) -> None:
    """It is raised, not handed over as a value, and its neighbours have their results."""

    def answer(items: list[int]) -> list[Any]:
        return [actors.TwoArguments(item, "odd") if item % 2 else item for item in items]

    _, far = gated(max_size=4, answer=answer)
    calls = [asyncio.create_task(far.ask(item)) for item in range(4)]
    assert [await calls[0], await calls[2]] == [0, 2]
    for item in (1, 3):
        with pytest.raises(actors.TwoArguments, match=f"{item}: odd"):
            await calls[item]


async def test_each_caller_raises_an_exception_of_its_own(gated: Any) -> None:
    """What one does to its exception, the others do not see; the cause is the same traceback."""
    _, far = gated(max_size=3, answer=raises(actors.TwoArguments(7, "all")))
    got = await settled(*asks(far, 1, 2, 3))
    assert [(type(each), each.code) for each in got] == [(actors.TwoArguments, 7)] * 3
    got[0].add_note("mine")
    assert not hasattr(got[1], "__notes__")
    assert all(type(each.__cause__) is RemoteTraceback for each in got)
    assert len({each.__cause__.text for each in got}) == 1


class Exits:
    """Cannot be pickled, and says so in the worst way."""

    def __reduce__(self) -> Any:
        raise asyncio.CancelledError("while pickling")


UNSENDABLE: dict[str, Any] = {
    "a lock": threading.Lock,
    "a class of nobody's": lambda: type("Nobodys", (), {})(),
    "an exception with a lock": lambda: actors.HoldsLock("held"),
    "an exception that comes back as none": actors.UnpicklesBadly,
    # one whose result it is wait for ever.
    "what exits when it is pickled": Exits,
}


@pytest.mark.parametrize("make", UNSENDABLE.values(), ids=UNSENDABLE)
async def test_results_are_delivered_whatever_cannot_be_sent(
    gated: Any, make: Callable[[], Any]
) -> None:
    """It is an error of its caller's alone, which comes, wherever in the batch it stands."""
    _, far = gated(max_size=3, answer=lambda items: [item or make() for item in items])
    got = await settled(*asks(far, 1, 0, 2))
    assert [got[0], got[2]] == [1, 2]
    assert isinstance(got[1], Exception)
    assert await settled(far.ask(3)) == [3]


async def test_a_broadcast_that_cannot_be_sent(gated: Any) -> None:
    """Everybody is told."""
    _, far = gated(max_size=3, answer=lambda items: Broadcast(threading.Lock()))
    got = await settled(*asks(far, 1, 2, 3))
    assert all(
        isinstance(each, TypeError) and "while pickling" in str(each.__notes__) for each in got
    )


# ── weights, keys and arguments ─────────────────────────────────────────────────────────────────


@pytest.mark.promise("batching.policy_raises")
@pytest.mark.parametrize("name", ["weight", "key", "member"])
async def test_a_function_of_the_policy_that_raises_is_its_callers_alone(
    gated: Any, name: str
) -> None:
    """The item never joins, and the queue goes on."""

    def picky(item: Any, scale: Any) -> Any:
        if item == "bad":
            raise LookupError("no such item")
        return 1

    if name == "member":
        made, far = gated(Round(1, member=picky))
    else:
        made, far = gated(max_size=4, **{"max_weight": 9, name: picky})
    for _ in range(2):
        got = await settled(*asks(far, "bad", 5))
        assert type(got[0]) is LookupError
        assert got[1] == 5
    assert made.batches == [[5], [5]]


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "heavy", None])
async def test_a_weight_that_cannot_be(gated: Any, weight: Any) -> None:
    """A ValueError that names the function, for its caller."""
    _, far = gated(max_size=2, max_weight=9, weight=lambda item, _: item)
    got = await settled(*asks(far, weight, 1))
    assert type(got[0]) is ValueError
    assert "weight of " in str(got[0])
    assert got[1] == 1


@pytest.mark.parametrize(
    "policy",
    [
        {"max_size": 2, "key": lambda item, _: item},
        {"policy": Round(2, member=lambda item, _: item)},
    ],
    ids=["key", "member"],
)
async def test_a_key_that_cannot_be_hashed_is_its_callers_alone(
    gated: Any, policy: dict[str, Any]
) -> None:
    """A TypeError at the call, and the others are together as ever."""
    _, far = gated(**policy)
    (told,) = await settled(far.ask([1]))
    assert type(told) is TypeError
    assert await settled(*asks(far, 1, 2)) == [1, 2]


async def test_an_item_that_does_not_fit_is_not_overtaken(gated: Any) -> None:
    """The longest start of the line leaves; what weighs more than a batch may goes alone."""
    made, far = gated(max_size=9, max_weight=10, weight=lambda item, _: item)
    made.gate.clear()
    calls = asks(far, 1)
    await arrived(far)
    calls += asks(far, 6, 5, 2, 30, 4, 6, 1)
    await arrived(far)
    made.gate.set()
    assert await settled(*calls) == [1, 6, 5, 2, 30, 4, 6, 1]
    assert made.batches == [[1], [6], [5, 2], [30], [4, 6], [1]]


@pytest.mark.promise("batching.keys")
async def test_order_within_a_key_and_no_key_starves(gated: Any) -> None:
    """Batches have one key each, in order of arrival; the line whose oldest came first leaves."""
    made, far = gated(max_size=2, key=lambda item, _: item[0])
    made.gate.clear()
    items = ["a0", "a1", "b0", "a2", "c0", "a3", "b1", "a4"]
    calls = asks(far, *items[:2])
    await arrived(far)
    calls += asks(far, *items[2:])
    await arrived(far)
    made.gate.set()
    assert await settled(*calls) == items
    assert made.batches == [["a0", "a1"], ["b0", "b1"], ["a2", "a3"], ["c0"], ["a4"]]


@pytest.mark.usefixtures("world")
async def test_bad_arguments_do_not_poison_the_others() -> None:
    """Who leaves a default out, who gives it and who gives too much are told apart."""

    class Scaled:
        @batched(max_size=8)
        async def ask(self, items: list[int], *, scale: list[int] = 10) -> list[int]:  # type: ignore[assignment]
            return [item * factor for item, factor in zip(items, scale, strict=True)]

    far = remote(RRef(Scaled()))
    calls = (
        far.ask(1),
        far.ask(2, scale=3),
        far.ask(3, 4),
        far.ask(),
        far.ask(5, size=1),
        far.ask(6),
    )
    got = await settled(*calls)
    assert [got[0], got[1], got[5]] == [10, 6, 60]
    assert [type(each) for each in got[2:5]] == [TypeError] * 3
    assert all("Scaled.ask()" in str(each) for each in got[2:5])


# ── instances, loops and functions that call ──────────────────────────────────────────────────────


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    @batched(max_size=8)
    async def who(self, items: list[int]) -> list[tuple[str, int]]:
        return [(self.name, len(items)) for _ in items]

    @staticmethod
    @batched(max_size=8)
    async def together(items: list[int]) -> list[int]:
        return [len(items)] * len(items)


@batched(max_size=8)
async def function(items: list[int]) -> list[int]:
    return [len(items)] * len(items)


@pytest.mark.promise("batching.instances")
@pytest.mark.usefixtures("world")
async def test_each_instance_has_its_own_queue() -> None:
    """Whichever way it is called; static methods and functions have one."""
    a, b = RRef(Named("a")), RRef(Named("b"))
    calls = remote(a).who(1), call(b, Named.who, 2), call(a, Named.who, 3)
    assert await asyncio.gather(*calls) == [("a", 2), ("b", 1), ("a", 2)]
    static = remote(a).together(1), remote(b).together(2), call("main", Named.together, 3)
    assert await asyncio.gather(*static) == [3] * 3
    assert await asyncio.gather(*(call("main", function, n) for n in range(3))) == [3] * 3


def test_a_second_world_on_a_second_loop() -> None:
    """A queue moves with its object, also when the first loop ended under its callers."""
    made: Any = None

    async def first() -> None:
        nonlocal made
        async with aiorpc.local_world(0):
            made, far = new_gated(max_size=2, max_wait=1000.0)
            calls = asks(far, "left behind")
            await arrived(far)
        assert [type(each) for each in await settled(*calls)] == [NotInWorld]

    async def second() -> list[Any]:
        async with aiorpc.local_world(0):
            return await settled(*asks(remote(RRef(made)), 1, 2))

    asyncio.run(first())
    assert asyncio.run(second()) == [1, 2]
    assert made.batches == [[1, 2]]


@pytest.mark.promise("batching.reentry")
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_function_that_awaits_its_own_queue(concurrency: int) -> None:
    """Its callers, elsewhere, are told instead of waiting for ever."""

    class Nested:
        @batched(max_size=8, max_concurrent_batches=concurrency)
        async def ask(self, items: list[int]) -> list[int]:
            return [await self.ask(item) for item in items]

    got = await settled(*asks(remote(RRef(Nested())), 1, 2))
    assert [type(each) for each in got] == [RuntimeError] * 2
    assert all("Nested.ask awaits itself" in str(each) for each in got)


async def test_leaving_a_world_answers_everybody() -> None:
    """Who runs, who waits and who waits for a round get NotInWorld."""
    async with aiorpc.local_world(0):
        (made, far), (met, meet) = new_gated(max_size=2), new_gated(Round(2))
        made.gate.clear()
        calls = asks(far, 1, 2, 3) + asks(meet, 4)
        await arrived(far)
    assert [type(each) for each in await settled(*calls)] == [NotInWorld] * 4
    assert (made.batches, met.batches) == ([[1, 2]], [])


# ── how many at once, how many wait ─────────────────────────────────────────────────────────────


@pytest.mark.promise("batching.one_at_a_time")
@pytest.mark.usefixtures("world")
async def test_two_batches_at_once_and_the_third_waits() -> None:
    """With `max_concurrent_batches=2`; whichever ends first makes room."""
    gates: dict[int, asyncio.Event] = collections.defaultdict(asyncio.Event)

    class Two(Gated):
        @batched(max_size=2, max_concurrent_batches=2)
        async def ask(self, items: list[int]) -> list[int]:
            self.batches.append(items)
            await gates[items[0]].wait()
            return items

    two = Two()
    far = remote(RRef(two))
    calls = asks(far, *range(6))
    await arrived(far)
    assert two.batches == [[0, 1], [2, 3]]
    gates[2].set()
    assert await settled(*calls[2:4]) == [2, 3]
    await arrived(far)
    assert two.batches == [[0, 1], [2, 3], [4, 5]]
    gates[4].set()
    gates[0].set()
    assert await settled(*calls) == [*range(6)]


@pytest.mark.promise("batching.full")
async def test_a_full_queue(gated: Any) -> None:
    """QueueFull arrives as itself, nothing of the call runs, and afterwards there is room."""
    made, far = gated(max_size=2, max_pending=2)
    made.gate.clear()
    calls = asks(far, 0, 1)
    await arrived(far)
    calls += asks(far, 2, 3, 4)
    (full,) = await settled(calls.pop())
    assert type(full) is QueueFull
    assert "queue full (max_pending=2)" in str(full)
    await cancel(far, calls.pop())  # its place is free at once
    calls += asks(far, 5)
    await arrived(far)
    made.gate.set()
    assert await settled(*calls) == [0, 1, 2, 5]
    assert made.batches == [[0, 1], [2, 5]]
    assert await settled(*asks(far, 6, 7)) == [6, 7]


# ── what is sent ────────────────────────────────────────────────────────────────────────────────


class Counted:
    pickled = 0

    def __reduce__(self) -> Any:
        Counted.pickled += 1
        return Counted, ()


@pytest.mark.promise("batching.broadcast")
async def test_a_broadcast_is_pickled_once(gated: Any) -> None:
    """However many callers there are; each has an object of its own."""
    _, far = gated(Round(8), answer=lambda items: {"it": Counted(), "x": torch.ones(3)})
    before = Counted.pickled
    got = await settled(*asks(far, *range(8)))
    assert Counted.pickled == before + 1
    assert len({id(each["it"]) for each in got}) == 8
    got[0]["x"].zero_()
    assert got[1]["x"].tolist() == [1.0] * 3


class Kept:
    """Batched functions whose names are told."""

    @batched(max_size=2, max_wait=1000.0)
    async def fill(self, items: list[int]) -> list[int]:
        return items

    @batched(max_size=4)
    async def slot(self, items: list[int]) -> list[int]:
        return items

    @batched(Round(2, quorum=1, timeout=1000.0))
    async def meet(self, items: list[int]) -> int:
        return len(items)

    @batched(Round(2, timeout=1000.0))
    async def fail(self, items: list[int]) -> int:
        return len(items)

    async def here(self) -> None:
        pass


@pytest.mark.promise("batching.stats")
async def test_statistics_of_batches(skip: Callable[[float], None]) -> None:
    """Why batches left, how full they were, and how long calls waited."""
    before = {"Kept.fill", "Kept.slot", "Kept.meet", "Kept.fail"} & stats().batches.keys()
    assert not before
    async with aiorpc.local_world(0):
        kept = Kept()
        far = remote(RRef(kept))
        await settled(far.fill(1), far.fill(2), far.slot(1), far.meet(1), far.meet(2))
        calls = [asyncio.create_task(outcome(each)) for each in (far.fill(3), far.meet(3))]
        failing = asyncio.create_task(outcome(far.fail(1)))
        await arrived(far)
        assert stats().batches["Kept.fill"].waiting == 1
        skip(1001.0)
        await settled(*calls, failing)
        last = asyncio.create_task(outcome(far.fill(4)))
        await arrived(far)
    assert type((await settled(last))[0]) is NotInWorld
    fill, slot, meet, fail = (
        stats().batches[f"Kept.{n}"] for n in ("fill", "slot", "meet", "fail")
    )
    assert fill.reasons == {"full": 1, "waited": 1, "closed": 1}
    assert (fill.batches, fill.items, fill.size, fill.waiting) == (2, 3, 2, 0)
    assert (fill.mean, fill.fill) == (1.5, 0.75)
    assert f"fill={fill.fill!r}" in repr(fill)
    assert fill.wait_p50 is not None
    assert fill.wait_p99 is not None
    assert fill.wait_p50 < 500.0 < fill.wait_p99
    assert (slot.reasons, slot.fill) == ({"slot": 1}, 0.25)
    assert meet.reasons == {"round": 1, "quorum": 1}
    assert isinstance(fail, BatchStats)
    assert (fail.reasons, fail.batches, fail.fill, fail.wait_p50) == ({"timeout": 1}, 0, 0.0, None)


class Busy:
    @batched(max_size=2)
    async def run(self, seconds: list[float]) -> list[float]:
        await asyncio.sleep(max(seconds))
        return seconds

    @batched(max_size=2)
    async def fail(self, seconds: list[float]) -> list[float]:
        await asyncio.sleep(max(seconds))
        raise ValueError


async def test_how_long_batches_ran() -> None:
    """Once for all of their calls, those that failed too."""
    async with aiorpc.local_world(0):
        far, began = remote(RRef(Busy())), time.monotonic()
        await asyncio.gather(far.run(0.02), far.run(0.02))
        with pytest.raises(ValueError, match=r"^$"):
            await far.fail(0.02)
        elapsed, found = time.monotonic() - began, stats().batches
    both = [found[f"Busy.{name}"].busy for name in ("run", "fail")]
    assert min(both) >= 0.015  # a clock may have steps
    assert sum(both) <= elapsed


# ── plain torch clients ─────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("torch_clients.batched")
async def test_torch_clients_of_every_policy(gated: Any) -> None:
    """`rpc_sync` and `rref.rpc_sync()` join rounds, stacks and lines by key, and a full queue."""
    met, meet = gated(Round(2, member=by_name), answer=list)
    theirs = asyncio.create_task(asyncio.to_thread(lambda: RRef(met).rpc_sync().ask("a1")))
    ours = asyncio.create_task(meet.ask("b1"))
    assert sorted(await theirs) == sorted(await ours) == ["a1", "b1"]

    stacked, _ = gated(max_size=2, stack=True, answer=lambda x: {"twice": 2 * x})
    got = await asyncio.to_thread(lambda: RRef(stacked).rpc_sync().ask(torch.ones(2)))
    assert got["twice"].tolist() == [2.0, 2.0]

    made, far = gated(max_size=1, max_pending=1, key=by_name)
    made.gate.clear()
    calls = asks(far, "a")
    await arrived(far)
    calls += asks(far, "b")
    await arrived(far)
    with pytest.raises(RuntimeError, match=r"QueueFull.*Made\.ask: queue full \(max_pending=1\)"):
        await asyncio.to_thread(lambda: RRef(made).rpc_sync().ask("c"))
    made.gate.set()
    assert await settled(*calls) == ["a", "b"]
    assert await asyncio.to_thread(rpc.rpc_sync, "main", Named.together, args=(1,)) == 1


# ── at the decoration ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given_", "error", "text"),
    [
        ({"policy": Round(2), "max_pending": 3}, TypeError, "not both"),
        ({"policy": aiorpc.Fill(2), "max_size": 3}, TypeError, "not both"),
        (
            {"max_size": 2, "device": "cuda"},
            TypeError,
            "device= requires stack=True or concat=True",
        ),
        (
            {"policy": Round(2), "device": "cpu"},
            TypeError,
            "device= requires stack=True or concat=True",
        ),
        ({"stack": True}, TypeError, "needs max_size=, or a Fill"),
        ({"concat": True}, TypeError, "needs max_size=, max_weight= or pad_to=, or a Fill"),
        ({"concat": True, "max_weight": 0}, ValueError, "max_weight must be above 0"),
        ({"concat": True, "max_weight": float("inf")}, ValueError, "max_weight must be above 0"),
        ({"max_size": 2, "stack": True, "concat": True}, TypeError, "not both"),
        ({"max_size": 2, "pad_to": (2,)}, TypeError, "pad_to= requires stack=True or concat=True"),
        (
            {"max_size": 2, "max_weight": 9, "weight": len, "concat": True},
            TypeError,
            "weighs as much as it has rows: leave out weight=",
        ),
        ({"policy": Round(2), "stack": True, "pad_to": (2,)}, TypeError, "pad_to= requires a Fill"),
        (
            {"max_size": 9, "stack": True, "pad_to": (2, 8)},
            ValueError,
            r"max_size=9 is more than the largest of pad_to=\(2, 8\): lower max_size=",
        ),
        (
            {"max_size": 2, "max_weight": 9, "concat": True, "pad_to": (2, 8)},
            ValueError,
            "max_weight=9 is more than the largest of pad_to=",
        ),
        *(
            ({"max_size": 1, "stack": True, "pad_to": sizes}, error, "pad_to must be ascending")
            for sizes, error in [
                ((), ValueError),
                ((0, 8), ValueError),
                ((-1,), ValueError),
                ((8, 2), ValueError),
                ((2, 2), ValueError),
                (8, TypeError),
                ("8", TypeError),
                ((2, 8.0), TypeError),
                ((True, 8), TypeError),
                ({2, 8}, TypeError),
            ]
        ),
        (
            {"max_size": 2, "max_concurrent_batches": 0},
            ValueError,
            "max_concurrent_batches must be at least 1",
        ),
        ({"max_size": 2, "max_pending": 0}, ValueError, "max_pending must be at least 1"),
        ({"max_size": 2, "key": "name"}, TypeError, "key must be a function"),
        ({"max_size": 2, "weight": len}, ValueError, "weight= requires max_weight="),
        ({"max_size": 2, "max_weight": 0}, ValueError, "max_weight must be above 0"),
    ],
)
def test_what_does_not_go_together(
    given_: dict[str, Any], error: type[Exception], text: str
) -> None:
    """It is told where it is written."""
    with pytest.raises(error, match=text):
        batched(**given_)


def test_a_quorum_that_cannot_be() -> None:
    """More than the round, or without a time at which it is enough."""
    with pytest.raises(ValueError, match="quorum must be at most size"):
        Round(2, quorum=3, timeout=1.0)
    with pytest.raises(ValueError, match="quorum= requires timeout="):
        Round(2, quorum=1)


# ── whatever happens ────────────────────────────────────────────────────────────────────────────

moves = st.one_of(
    st.tuples(st.just("call"), st.sampled_from(["fine", "fine", "wrong", "refused"])),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.sampled_from(["wait", "shut", "open"]), st.none()),
)
endings = st.sampled_from(["answer", "answer", "raise", "too few", "exit"])


@pytest.mark.promise("batching.results")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(moves, max_size=20), st.lists(endings, min_size=1), st.integers(1, 3))
async def test_every_call_settles_once_with_its_own_answer(
    gated: Any, moves: list[tuple[str, Any]], endings: list[str], concurrency: int
) -> None:
    """Whoever comes, gives up and fails when, each gets what is its own, and no call runs twice."""
    ended: dict[int, str] = {}

    def weight(item: tuple[int, str], _: Any) -> int:
        if item[1] == "refused":
            raise LookupError(item[0])
        return 1

    def answer(items: list[tuple[int, str]]) -> list[Any]:
        ending = endings[made.batches.index(items) % len(endings)]
        ended.update((number, ending) for number, _ in items)
        if ending in ("raise", "exit"):
            raise SystemExit(3) if ending == "exit" else actors.TwoArguments(len(items), "all")
        answers = [KeyError(n) if kind == "wrong" else -n for n, kind in items]
        return answers[1:] if ending == "too few" else answers

    made, far = gated(
        max_size=3, max_concurrent_batches=concurrency, weight=weight, max_weight=3, answer=answer
    )
    calls: list[asyncio.Task[Any]] = []
    kinds: list[str] = []
    erased: set[int] = set()
    for move, what in moves:
        if move == "call":
            calls += asks(far, (len(calls), what))
            kinds.append(what)
        elif move == "cancel" and what < len(calls):
            await arrived(far)
            if calls[what].cancel():
                await arrived(far)
                erased |= {what} - {number for batch in made.batches for number, _ in batch}
        elif move == "wait":
            await arrived(far)
        elif move in ("shut", "open"):
            (made.gate.set if move == "open" else made.gate.clear)()
    made.gate.set()
    async with asyncio.timeout(30.0):
        got = await asyncio.gather(*calls, return_exceptions=True)

    ran = [number for batch in made.batches for number, _ in batch]
    assert ran == sorted(set(ran))
    refused = {number for number, kind in enumerate(kinds) if kind == "refused"}
    assert not set(ran) & (erased | refused)
    raised = [id(each) for each in got if isinstance(each, Exception)]
    assert len(set(raised)) == len(raised)
    classes = {"raise": actors.TwoArguments, "too few": BatchContractError, "exit": RemoteError}
    for number, (kind, each) in enumerate(zip(kinds, got, strict=True)):
        if isinstance(each, asyncio.CancelledError):
            continue
        if kind == "refused":
            assert (type(each), each.args) == (LookupError, (number,))
        elif ended[number] != "answer":
            assert type(each) is classes[ended[number]]
        elif kind == "wrong":
            assert (type(each), each.args) == (KeyError, (number,))
        else:
            assert each == -number
