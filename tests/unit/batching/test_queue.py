"""`@batched` on a plain asyncio loop: no world, no RPC, and no sleep that decides an order."""

import asyncio
import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from aiorpc_torch import (
    BatchContractError,
    Broadcast,
    Fill,
    NotInWorld,
    RemoteError,
    Round,
    batched,
)
from tests.support.slack import SLACK


async def iterations(count: int = 4) -> None:
    """Wait for `count` loop iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


async def outcome(awaitable: Any) -> Any:
    """What it returns or raises, as a value."""
    try:
        return await awaitable
    except Exception as exc:
        return exc


class Gated:
    """A function that notes each batch and waits at its gate."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.started = asyncio.Event()
        self.gate = asyncio.Event()

    @batched(max_size=3)
    async def pass_(self, items: list[Any]) -> list[Any]:
        self.batches.append(items)
        self.started.set()
        await self.gate.wait()
        return [("passed", item) for item in items]

    @batched(Round(size=3))
    async def meet(self, items: list[Any]) -> tuple[Any, ...]:
        self.batches.append(items)
        return tuple(items)

    async def busy(self) -> "asyncio.Future[Any]":
        """Let a first batch run, and stand at the gate."""
        first = asyncio.ensure_future(self.pass_("first"))
        await self.started.wait()
        return first


# ── arguments and answers ───────────────────────────────────────────────────────────────────────


class Columns:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    @batched(max_size=10)
    async def mixed(self, a: list[Any], b: list[Any] = 7, *, c: list[Any], d: Any = None) -> Any:
        self.seen.append((a, b, c, d))
        return list(zip(a, b, c, d, strict=True))

    @batched(max_size=10)
    async def positional(self, a: list[Any], /, b: list[Any]) -> Any:
        return list(zip(a, b, strict=True))

    @batched(max_size=10)
    async def nothing(self) -> Any:
        return Broadcast("nothing")

    @batched(max_size=10)
    async def answer(self, answers: list[Any]) -> Any:
        return answers[0]


@pytest.mark.promise("batching.one_call")
async def test_one_list_for_each_parameter() -> None:
    """However a caller passes its arguments, they stand in their columns, defaults filled in."""
    columns = Columns()
    rows = await asyncio.gather(
        columns.mixed(1, c="x"),
        columns.mixed(2, 3, c="y", d=4),
        columns.mixed(b=5, a=6, d=8, c="z"),
    )
    assert rows == [(1, 7, "x", None), (2, 3, "y", 4), (6, 5, "z", 8)]
    assert columns.seen == [([1, 2, 6], [7, 3, 5], ["x", "y", "z"], [None, 4, 8])]


async def test_positional_only_parameters() -> None:
    """They are positional for the caller and for the function."""
    assert await Columns().positional(1, b=2) == (1, 2)
    with pytest.raises(TypeError, match=r"Columns\.positional\(\) .*'a'"):
        Columns().positional(a=1, b=2)


async def test_no_parameters() -> None:
    """Callers without arguments are batched too."""
    columns = Columns()
    assert await asyncio.gather(columns.nothing(), columns.nothing()) == ["nothing"] * 2


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2, 3), {"c": 0}), ((1,), {}), ((1,), {"c": 0, "e": 1})]
)
async def test_arguments_that_do_not_fit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """They are a TypeError of that caller, at the call, that names the function."""
    columns = Columns()
    neighbour = asyncio.ensure_future(columns.mixed(1, c=2))
    with pytest.raises(TypeError, match=r"^Columns\.mixed\(\) "):
        columns.mixed(*args, **kwargs)
    assert await neighbour == (1, 7, 2, None)


@pytest.mark.promise("batching.results")
@pytest.mark.parametrize(
    "make", [list, tuple, np.array, lambda rows: torch.tensor([[x] for x in rows])]
)
async def test_each_gets_its_own(make: Callable[[Any], Any]) -> None:
    """A list, a tuple, or an array or tensor whose first dimension is the batch: row by row."""

    @batched(max_size=10)
    async def double(items: list[int]) -> Any:
        return make([2 * item for item in items])

    answers = await asyncio.gather(*(double(n) for n in range(25)))
    assert [int(answer) for answer in answers] == [2 * n for n in range(25)]
    assert not isinstance(answers[0], torch.Tensor) or answers[0].shape == (1,)


@pytest.mark.promise("batching.broadcast")
async def test_broadcast_is_one_answer_for_all() -> None:
    """The very object, not a copy for each."""
    value = {"lr": 0.1}
    columns = Columns()
    answers = await asyncio.gather(*(columns.answer(Broadcast(value)) for _ in range(3)))
    assert all(answer is value for answer in answers)


@pytest.mark.promise("batching.contract")
@pytest.mark.parametrize(
    ("answer", "described"),
    [
        ("no", "a str"),
        (b"no", "bytes"),
        (bytearray(2), "a bytearray"),
        ({1: 1, 2: 2}, "a dict"),
        ({1, 2}, "a set"),
        (None, "None"),
        (7, "a int"),
        pytest.param(iter([1, 2]), "a list_iterator", id="an iterator"),
        (torch.tensor(1.0), "a tensor with no dimension"),
        (np.array(1.0), "an array with no dimension"),
        ([1], "returned 1 results"),
        ([1, 2, 3], "returned 3 results"),
        ([], "returned 0 results"),
        (torch.zeros(3, 2), "returned 3 results"),
    ],
    ids=str,
)
async def test_an_answer_that_is_not_one_for_each(answer: Any, described: str) -> None:
    """Every caller gets an error of its own that names the function, the batch and the answer."""
    columns = Columns()
    got = await asyncio.gather(*(outcome(columns.answer(answer)) for _ in range(2)))
    assert [type(exc) for exc in got] == [BatchContractError] * 2
    assert got[0] is not got[1]
    for exc in got:
        assert "Columns.answer got a batch of 2" in str(exc)
        assert described in str(exc)
    assert await columns.answer([5]) == 5


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


class Failing:
    @batched(max_size=10)
    async def raise_(self, excs: list[BaseException]) -> Any:
        raise excs[0]

    @batched(max_size=10)
    def raise_in_thread(self, excs: list[BaseException]) -> Any:
        raise excs[0]

    @batched(max_size=10)
    async def hand_back(self, items: list[Any]) -> list[Any]:
        return items


class Formatted(Exception):
    """Not to be made again from its arguments."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"[{code}] {reason}")
        self.code = code


@pytest.mark.promise("batching.own_exception")
async def test_an_exception_among_the_answers_is_that_callers_alone() -> None:
    """It raises for its caller; the neighbours have their results."""
    mine, failing = Formatted(1, "mine"), Failing()
    got = await asyncio.gather(*(outcome(failing.hand_back(x)) for x in (1, mine, 3)))
    assert got == [1, mine, 3]
    with pytest.raises(Formatted) as caught:
        await failing.hand_back(mine)
    assert caught.value is mine


async def test_one_exception_handed_to_two_callers_is_two() -> None:
    """Two tasks that raise one object write into each other's traceback."""
    shared, failing = Formatted(1, "shared"), Failing()
    got = await asyncio.gather(
        *(outcome(failing.hand_back(x)) for x in (shared, shared, 3, shared))
    )
    excs = [got[0], got[1], got[3]]
    assert got[2] == 3
    assert len({id(exc) for exc in excs}) == 3
    assert [type(exc) for exc in excs] == [Formatted] * 3
    assert [exc.code for exc in excs] == [1] * 3


async def test_broadcast_of_an_exception() -> None:
    """It raises for every caller, for each an object of its own."""
    columns = Columns()
    got = await asyncio.gather(*(outcome(columns.answer(Broadcast(KeyError(1)))) for _ in "ab"))
    assert [type(exc) for exc in got] == [KeyError] * 2
    assert got[0] is not got[1]


@pytest.mark.promise("batching.raises")
@pytest.mark.parametrize("method", ["raise_", "raise_in_thread"])
async def test_a_raising_function_raises_for_each(method: str) -> None:
    """Distinct exceptions like the one that was raised, which is the cause of all."""
    failing, exc = Failing(), Formatted(503, "busy")
    call = getattr(failing, method)
    got = await asyncio.gather(*(outcome(call(exc)) for _ in range(4)))
    assert len({id(each) for each in (exc, *got)}) == 5
    for each in got:
        assert (type(each), each.args, each.code) == (Formatted, exc.args, 503)
        assert each.__cause__ is exc
    assert await failing.hand_back(1) == 1


STAYS = [
    SystemExit(3),
    KeyboardInterrupt("x"),
    asyncio.CancelledError("x"),
    GeneratorExit("x"),
]


@pytest.mark.promise("batching.raises")
@pytest.mark.parametrize("method", ["raise_", "raise_in_thread"])
@pytest.mark.parametrize("exc", STAYS, ids=repr)
async def test_whatever_a_function_raises_every_caller_is_answered(
    method: str, exc: BaseException
) -> None:
    """What would end the caller's task or process arrives as RemoteError, and the queue lives."""
    failing = Failing()
    call = getattr(failing, method)
    got = await asyncio.gather(*(outcome(call(exc)) for _ in range(3)))
    assert [type(each) for each in got] == [RemoteError] * 3
    assert len({id(each) for each in got}) == 3
    for each in got:
        assert f"Failing.{method} raised" in str(each)
        assert type(exc).__name__ in str(each)
        assert each.__cause__ is exc
    again = await asyncio.gather(*(outcome(call(ValueError("still there"))) for _ in range(2)))
    assert [type(each) for each in again] == [ValueError] * 2


@pytest.mark.parametrize("method", ["raise_", "raise_in_thread"])
@pytest.mark.parametrize("exc", [StopIteration(3), StopAsyncIteration(3)], ids=repr)
async def test_a_function_that_raises_the_end_of_an_iteration(method: str, exc: Exception) -> None:
    """No coroutine can raise it; the callers are told by an error they can catch."""
    got = await asyncio.gather(*(outcome(getattr(Failing(), method)(exc)) for _ in range(2)))
    for each in got:
        assert isinstance(each, RuntimeError | RemoteError)
        assert type(exc).__name__ in str(each)


@pytest.mark.parametrize("exc", [*STAYS, StopIteration(1), StopAsyncIteration(2)], ids=repr)
async def test_whatever_is_among_the_answers_its_caller_can_catch_it(exc: BaseException) -> None:
    """As RemoteError, caused by what was handed back; the neighbour has its result."""
    failing = Failing()
    got = await asyncio.gather(*(outcome(failing.hand_back(x)) for x in (exc, 2)))
    assert type(got[0]) is RemoteError
    assert got[0].__cause__ is exc
    assert got[1] == 2


class Stubborn(Exception):
    """Cannot be changed, and cannot be described."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")

    def __str__(self) -> str:
        raise AttributeError("cannot be shown")


@pytest.mark.parametrize("method", ["raise_", "hand_back"])
async def test_an_exception_that_resists_reaches_its_callers(method: str) -> None:
    """No caller is left waiting because an exception's own methods raise."""
    call, exc = getattr(Failing(), method), Stubborn()
    got = await asyncio.wait_for(asyncio.gather(*(outcome(call(exc)) for _ in range(2))), 5.0)
    assert [type(each) for each in got] == [Stubborn] * 2
    assert got[0] is not got[1]


# ── when a batch leaves ─────────────────────────────────────────────────────────────────────────


class Fickle:
    """Its hash is known at first, and raises later."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __hash__(self) -> int:
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError("in __hash__")
        return 1


@batched(Fill(4, 60.0, key=lambda key: key))
async def by_key(keys: list[Any]) -> list[int]:
    return [1] * len(keys)


@batched(Round(2, member=lambda member: member))
async def by_member(members: list[Any]) -> int:
    return 1


@pytest.mark.parametrize(("function", "hashes"), [(by_key, 3), (by_member, 2)])
async def test_a_key_or_member_that_fails_while_its_call_waits(function: Any, hashes: int) -> None:
    """The calls that wait fail with it; later ones do not."""
    async with asyncio.timeout(SLACK):
        found = await asyncio.gather(outcome(function(Fickle(hashes))), outcome(function(3)))
        assert [type(each) for each in found] == [ZeroDivisionError] * 2
        later = [1, 1, 1, 1] if function is by_key else [1, 2]  # one key, or two members
        assert {*await asyncio.gather(*map(function, later))} == {1}


async def test_a_key_that_fails_as_its_call_is_cancelled() -> None:
    """The cancellation goes through; the calls that waited fail with the key's exception."""
    key = Fickle(1000)
    async with asyncio.timeout(SLACK):
        cancelled = asyncio.ensure_future(by_key(key))
        beside = asyncio.create_task(outcome(by_key(3)))
        await iterations()
        key.left = 0
        cancelled.cancel()
        assert type(await beside) is ZeroDivisionError
        assert cancelled.cancelled()
        assert {*await asyncio.gather(*map(by_key, [1, 1, 1, 1]))} == {1}


@pytest.mark.promise("batching.one_call")
async def test_calls_of_one_loop_iteration_share_a_batch() -> None:
    """Calls made in one loop iteration are one batch, though no call waits for others."""
    columns = Columns()
    await asyncio.gather(*(columns.mixed(n, c=n) for n in range(10)))
    await asyncio.gather(*(columns.mixed(n, c=n) for n in range(4)))
    assert [len(batch[0]) for batch in columns.seen] == [10, 4]


async def test_a_batch_forms_while_the_function_is_busy() -> None:
    """Members are chosen when the slot is free: who came and who left until then counts."""
    gated = Gated()
    first = await gated.busy()
    waiting = [asyncio.create_task(outcome(gated.pass_(n))) for n in range(4)]
    await iterations()
    waiting[0].cancel()
    waiting[2].cancel()
    await iterations()
    late = [asyncio.create_task(outcome(gated.pass_(n))) for n in (4, 5)]
    await iterations()
    assert gated.batches == [["first"]]
    gated.gate.set()
    await asyncio.gather(first, *waiting, *late, return_exceptions=True)
    assert gated.batches == [["first"], [1, 3, 4], [5]]
    assert waiting[0].cancelled()
    assert waiting[3].result() == ("passed", 3)
    assert late[1].result() == ("passed", 5)


@pytest.mark.promise("batching.leave")
async def test_a_call_cancelled_in_its_own_iteration_never_runs() -> None:
    """Joined and cancelled before the next loop iteration: no function runs for it."""
    gated = Gated()
    ask = asyncio.ensure_future(gated.pass_(1))
    ask.cancel()
    await iterations()
    assert gated.batches == []


async def test_cancelled_while_its_batch_runs() -> None:
    """The batch runs on for the others, and its result is dropped."""
    gated = Gated()
    tasks = [asyncio.create_task(outcome(gated.pass_(n))) for n in range(2)]
    await gated.started.wait()
    tasks[0].cancel()
    await iterations()
    assert tasks[0].cancelled()
    gated.gate.set()
    assert await tasks[1] == ("passed", 1)
    assert gated.batches == [[0, 1]]


@pytest.mark.promise("rounds.leave")
async def test_a_cancelled_contributor_leaves_its_round() -> None:
    """A round waits for as many as it was told, not counting who has left."""
    gated = Gated()
    early = [asyncio.ensure_future(gated.meet(n)) for n in range(2)]
    await iterations()
    early[0].cancel()
    later = asyncio.ensure_future(gated.meet(2))
    await iterations()
    assert gated.batches == []
    assert await asyncio.gather(gated.meet(3), later, early[1]) == [(1, 2, 3)] * 3
    assert gated.batches == [[1, 2, 3]]


@pytest.mark.promise("rounds.exact")
async def test_rounds_are_of_exactly_their_size() -> None:
    """Seven contributions make two rounds of three, and one that waits."""
    gated = Gated()
    tasks = [asyncio.ensure_future(gated.meet(n)) for n in range(7)]
    await asyncio.gather(*tasks[:6])
    await iterations()
    assert gated.batches == [[0, 1, 2], [3, 4, 5]]
    assert not tasks[6].done()
    tasks[6].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[6]


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its time stands still while there is something to do, then jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 1e6 / 3
        super().__init__()

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        timers = [each for each in self._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and timers:  # type: ignore[attr-defined]
            self.now = max(self.now, min(timers).when())
        super()._run_once()  # type: ignore[misc]


def in_virtual_time(main: Callable[[JumpingLoop], Coroutine[Any, Any, None]]) -> None:
    loop = JumpingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main(loop))


@pytest.mark.promise("batching.wait")
def test_the_oldest_waits_for_company_no_longer_than_told() -> None:
    """With `max_wait`, a batch leaves so long after its oldest member came, or when it is full."""

    async def main(loop: JumpingLoop) -> None:
        start, left = loop.now, []

        @batched(max_size=3, max_wait=0.5)
        async def note(items: list[str]) -> list[str]:
            left.append((loop.now - start, items))
            return items

        async def at(seconds: float, item: str) -> str:
            await asyncio.sleep(seconds)
            return await note(item)

        times = {"a": 0.0, "b": 0.25, "c": 1.0, "d": 1.125, "e": 1.25, "f": 2.0}
        await asyncio.gather(*(at(seconds, item) for item, seconds in times.items()))
        expected = [(0.5, ["a", "b"]), (1.25, ["c", "d", "e"]), (2.5, ["f"])]
        assert [items for _, items in left] == [items for _, items in expected]
        assert [at for at, _ in left] == pytest.approx([at for at, _ in expected])

    in_virtual_time(main)


def test_the_timer_follows_the_oldest_who_still_waits() -> None:
    """When the oldest gives up, the next one's own arrival counts; when all do, nothing runs."""

    async def main(loop: JumpingLoop) -> None:
        start, left = loop.now, []

        @batched(max_size=9, max_wait=1.0)
        async def note(items: list[str]) -> list[str]:
            left.append((loop.now - start, items))
            return items

        oldest = asyncio.ensure_future(note("a"))
        await asyncio.sleep(0.5)
        next_one = asyncio.ensure_future(note("b"))
        await asyncio.sleep(0.25)
        oldest.cancel()
        assert await next_one == "b"
        assert left == [(pytest.approx(1.5), ["b"])]
        alone = asyncio.ensure_future(note("c"))
        await asyncio.sleep(0.5)
        alone.cancel()
        await asyncio.sleep(10.0)
        assert len(left) == 1

    in_virtual_time(main)


moves = st.tuples(
    st.sampled_from([0.0, 0.0, 0.1, 1.0]), st.sampled_from(["call", "call", "call", "cancel"])
)
endings = st.sampled_from(["answer", "answer", "one raises", "all raise", "too few", "exit"])


@pytest.mark.promise("batching.results")
@given(
    st.builds(Fill, st.integers(1, 4), st.sampled_from([0.0, 0.25])),
    st.lists(moves, max_size=25),
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 2.0]), endings), min_size=1, max_size=5),
)
def test_every_call_settles_once_with_its_own_answer(
    policy: Fill, moves: list[tuple[float, str]], bodies: list[tuple[float, str]]
) -> None:
    """Whatever comes, gives up and fails when, each gets its own result, and no call runs twice."""
    batches: list[tuple[list[int], str]] = []

    @batched(policy)
    async def body(items: list[int]) -> Any:
        seconds, ending = bodies[len(batches) % len(bodies)]
        batches.append((items, ending))
        await asyncio.sleep(seconds)
        if ending == "all raise":
            raise Formatted(len(batches), "all")
        if ending == "exit":
            raise SystemExit(3)
        answers: list[Any] = [-item for item in items]
        if ending == "one raises":
            answers[-1] = Formatted(items[-1], "one")
        return answers[1:] if ending == "too few" else answers

    async def main(loop: JumpingLoop) -> None:
        asks: list[asyncio.Future[Any]] = []
        for seconds, move in moves:
            await asyncio.sleep(seconds)
            if move == "call":
                asks.append(asyncio.ensure_future(body(len(asks))))
            elif asks:
                asks[len(asks) // 2].cancel()
        got = await asyncio.gather(*asks, return_exceptions=True)
        ran = [item for items, _ in batches for item in items]
        assert ran == sorted(set(ran))
        assert {n for n, ask in enumerate(asks) if not ask.cancelled()} <= set(ran)
        for items, ending in batches:
            assert 1 <= len(items) <= policy.max_size
            for item in items:
                if not asks[item].cancelled():
                    check(got[item], item, items, ending)

    def check(answer: Any, item: int, items: list[int], ending: str) -> None:
        if ending == "one raises" and item == items[-1]:
            assert (type(answer), answer.code) == (Formatted, item)
        elif ending in ("answer", "one raises"):
            assert answer == -item
        else:
            expected = {"all raise": Formatted, "too few": BatchContractError, "exit": RemoteError}
            assert type(answer) is expected[ending]

    in_virtual_time(main)


# ── instances, functions, threads ───────────────────────────────────────────────────────────────


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    @batched(max_size=10)
    async def who(self, items: list[int]) -> list[Any]:
        return [(self.name, len(items), item) for item in items]

    @staticmethod
    @batched(max_size=10)
    async def static(items: list[int]) -> list[Any]:
        return [(len(items), item) for item in items]


@pytest.mark.promise("batching.instances")
async def test_each_instance_has_its_own_queue() -> None:
    """Callers of two objects are never in one batch, and no caller gets the other's result."""
    a, b = Named("a"), Named("b")
    got = await asyncio.gather(a.who(1), b.who(2), a.who(3), Named.who(b, 4))
    assert got == [("a", 2, 1), ("b", 2, 2), ("a", 2, 3), ("b", 2, 4)]


async def test_each_method_has_its_own_queue() -> None:
    """Two batched methods of an object run at once."""
    gated = Gated()
    first = await gated.busy()
    assert await asyncio.gather(*(gated.meet(n) for n in range(3))) == [(0, 1, 2)] * 3
    gated.gate.set()
    await first


async def test_a_static_method_has_one_queue() -> None:
    """Through the class or any instance, its callers are together."""
    got = await asyncio.gather(Named.static(1), Named("a").static(2), Named("b").static(3))
    assert got == [(3, 1), (3, 2), (3, 3)]


@batched(max_size=10)
async def plain(items: list[int], factors: list[int] = 2) -> list[Any]:  # type: ignore[assignment]
    """What it says."""
    return [item * factor for item, factor in zip(items, factors, strict=True)]


async def test_a_plain_function() -> None:
    """Batched as a method is, without an instance; name and docstring are the function's."""
    assert await asyncio.gather(plain(1), plain(2, 5), plain(factors=1, items=9)) == [2, 10, 9]
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "What it says."
    assert repr(plain) == "<batched plain Fill(max_size=10)>"


async def test_a_subclass_that_calls_the_batched_method_it_overrides() -> None:
    """Each class's method is a queue of its own: `super()` is no reentry."""

    class Loud(Named):
        @batched(max_size=10)
        async def who(self, items: list[int]) -> list[Any]:
            inner = await asyncio.gather(*(super(Loud, self).who(item) for item in items))
            return [(name.upper(), size, item) for name, size, item in inner]

    loud = Loud("x")
    assert await asyncio.gather(loud.who(1), loud.who(2)) == [("X", 2, 1), ("X", 2, 2)]


class Unhashable:
    """Equal to all others, and no key of a dict."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    @batched(max_size=10)
    async def size(self, items: list[int]) -> list[int]:
        return [len(items)] * len(items)


async def test_instances_are_told_apart_by_identity() -> None:
    """An instance may define equality and forbid hashing."""
    a, b = Unhashable(), Unhashable()
    assert await asyncio.gather(a.size(1), b.size(1), b.size(1)) == [1, 2, 2]


@pytest.mark.promise("batching.instances")
async def test_an_instance_is_not_kept_alive() -> None:
    """Once used, failed and given up on, it goes when its user lets it go."""
    gated, failing = Gated(), Failing()
    first = await gated.busy()
    given_up = asyncio.create_task(outcome(gated.pass_(1)))
    await iterations()
    given_up.cancel()
    gated.gate.set()
    await asyncio.gather(first, *(gated.meet(n) for n in range(3)))
    await outcome(failing.raise_(ValueError()))
    await iterations()
    gone = weakref.ref(gated), weakref.ref(failing)
    del gated, failing, first, given_up
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


async def test_a_queue_goes_with_its_instance() -> None:
    """A million short-lived instances leave no queues, and a reused address no neighbour's."""
    for number in range(200):
        assert await Named(str(number)).who(number) == (str(number), 1, number)
    gc.collect()
    assert len(Named.who._queues) <= 1  # type: ignore[attr-defined]


async def test_slots_without_weak_references() -> None:
    """The error says what to add to the class."""

    class Slotted:
        __slots__ = ()

        @batched(max_size=2)
        async def f(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match=r"'__weakref__' to the __slots__ of Slotted"):
        Slotted().f(1)


async def test_a_plain_def_runs_in_a_thread() -> None:
    """The loop goes on meanwhile, and the thread is none of the loop's."""
    inside, release = threading.Event(), threading.Event()
    names: list[str] = []

    @batched(max_size=10)
    def work(items: list[int]) -> list[int]:
        names.append(threading.current_thread().name)
        inside.set()
        assert release.wait(30.0)
        return [item + 1 for item in items]

    calls = asyncio.gather(work(1), work(2))
    await asyncio.to_thread(inside.wait)
    await iterations()
    assert not calls.done()
    release.set()
    assert await calls == [2, 3]
    assert len(names) == 1
    assert names[0] != threading.current_thread().name


async def test_one_batch_at_a_time_in_threads_too() -> None:
    """The next function starts after the last one has returned."""
    running, most = 0, 0

    @batched(max_size=2)
    def work(items: list[int]) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        running -= 1
        return items

    assert await asyncio.gather(*(work(n) for n in range(20))) == list(range(20))
    assert most == 1


# ── a function that awaits itself ─────────────────────────────────────────────────────────────────


class Nested:
    def __init__(self, other: "Nested | None" = None) -> None:
        self.other = other

    @batched(max_size=10)
    async def direct(self, items: list[int]) -> list[int]:
        return [await self.direct(item) for item in items]

    @batched(max_size=10)
    async def in_a_task(self, items: list[int]) -> list[int]:
        return await asyncio.gather(*(asyncio.create_task(self.again(item)) for item in items))

    async def again(self, item: int) -> int:
        return await self.in_a_task(item)

    @batched(max_size=10)
    async def first(self, items: list[int]) -> list[int]:
        return [await self.second(item) for item in items]

    @batched(max_size=10)
    async def second(self, items: list[int]) -> list[int]:
        return [await self.first(item) for item in items]

    @batched(max_size=10)
    async def down(self, items: list[int]) -> list[int]:
        if self.other is None:
            return items
        return [10 * x for x in await asyncio.gather(*(self.other.down(x) for x in items))]

    @batched(max_size=10)
    async def caught(self, items: list[int]) -> list[int]:
        with contextlib.suppress(RuntimeError):
            await self.caught(1)
        return items


@pytest.mark.promise("batching.reentry")
@pytest.mark.parametrize("method", ["direct", "in_a_task", "first", "second"])
async def test_a_function_that_awaits_its_own_queue_raises(method: str) -> None:
    """It would wait for itself: RuntimeError, directly, in a task, and through a second queue."""
    call = getattr(Nested(), method)
    got = await asyncio.wait_for(asyncio.gather(outcome(call(1)), outcome(call(2))), 10.0)
    for exc in got:
        assert type(exc) is RuntimeError
        assert "awaits itself" in str(exc)
        assert f"Nested.{method}" in str(exc)


async def test_after_reentry_the_queue_goes_on() -> None:
    """A function may catch the error, and later calls are served."""
    nested = Nested()
    assert await nested.caught(1) == 1
    assert await asyncio.gather(nested.caught(2), nested.caught(3)) == [2, 3]


async def test_another_instance_is_no_reentry() -> None:
    """The same method of another object is another queue."""
    chain = Nested(Nested(Nested()))
    assert await asyncio.gather(chain.down(1), chain.down(2)) == [100, 200]


async def test_who_was_called_from_a_function_may_call_it_later() -> None:
    """A task that a function left behind may join the queue when the batch is over."""
    later: list[asyncio.Task[int]] = []
    go = asyncio.Event()

    @batched(max_size=10)
    async def f(items: list[int]) -> list[int]:
        if not later:
            later.append(asyncio.create_task(after()))
        return items

    async def after() -> int:
        await go.wait()
        return await f(5)

    assert await f(1) == 1
    go.set()
    assert await later[0] == 5


# ── loops ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("batching.alone")
def test_a_second_asyncio_run() -> None:
    """A queue moves to the loop that awaits it, when nothing of it is left on the last one."""
    named = Named("a")

    async def main() -> list[Any]:
        return await asyncio.gather(named.who(1), named.who(2))

    for _ in range(3):
        assert asyncio.run(main()) == [("a", 2, 1), ("a", 2, 2)]


class Half:
    @batched(max_size=2, max_wait=3600.0)
    async def f(self, items: list[Any]) -> list[Any]:
        if "stuck" in items:
            await asyncio.Event().wait()
        return items


async def two_of(half: Half) -> list[Any]:
    async with asyncio.timeout(30.0):
        return await asyncio.gather(half.f(3), half.f(4))


def test_a_second_run_after_one_that_was_cut_short() -> None:
    """With a batch running, callers waiting and a timer set, the loop ends; the next one works."""

    half = Half()

    async def cut_short() -> None:
        tasks = [asyncio.create_task(outcome(half.f(x))) for x in ("stuck", 1, 2)]
        await iterations()
        assert not any(task.done() for task in tasks)

    for _ in range(2):
        asyncio.run(cut_short())
        assert asyncio.run(two_of(half)) == [3, 4]


@contextlib.contextmanager
def loop_on_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.promise("batching.alone")
async def test_busy_on_another_loop() -> None:
    """While one loop waits for it, a call from another raises at once; afterwards it is served."""
    gated = Gated()
    first = await gated.busy()

    async def elsewhere() -> Any:
        return await gated.pass_("elsewhere")

    with loop_on_a_thread() as loop:
        call = asyncio.run_coroutine_threadsafe(elsewhere(), loop)
        with pytest.raises(RuntimeError, match=r"Gated\.pass_ is busy on another event loop"):
            await asyncio.wrap_future(call)
        gated.gate.set()
        assert await first == ("passed", "first")
        await iterations()
        gated.gate = asyncio.Event()
        gated.gate.set()
        gated.started = asyncio.Event()
        call = asyncio.run_coroutine_threadsafe(elsewhere(), loop)
        assert await asyncio.wrap_future(call) == ("passed", "elsewhere")


def test_outside_a_loop_and_a_world() -> None:
    """There is no loop to run the batch, and the error says what to enter."""
    with pytest.raises(NotInWorld, match=r"enter worker\(\), local_world\(\) or attach\(\)"):
        plain(1)


@pytest.mark.parametrize("used_again", [True, False])
def test_a_loop_that_was_closed_under_a_batch(
    used_again: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it reaches the next loop, and its end prints nothing of ours."""
    gated = [Half()]
    loop = asyncio.new_event_loop()

    async def begin() -> None:
        for item in ("stuck", 1, 2):
            gated[0].f(item)
        await iterations()

    loop.run_until_complete(begin())
    loop.close()
    if used_again:
        assert asyncio.run(two_of(gated[0])) == [3, 4]
    gated.clear()
    gc.collect()
    printed = capfd.readouterr().err
    assert "Exception ignored" not in printed
    assert "Traceback" not in printed


@pytest.mark.promise("batching.context")
async def test_the_context_of_one_caller_is_not_the_functions() -> None:
    """A function runs for all its callers, so in none's context."""
    import contextvars

    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="default")

    @batched(max_size=10)
    async def ask(items: list[int]) -> list[str]:
        return [who.get()] * len(items)

    who.set("caller")
    assert await ask(1) == "default"


# ── at the decoration ───────────────────────────────────────────────────────────────────────────


async def body(self: Any, items: list[Any]) -> list[Any]:
    return items


async def starred(self: Any, *items: Any) -> list[Any]:
    return list(items)


async def keywords(self: Any, **items: Any) -> list[Any]:
    return list(items)


def test_a_signature_that_cannot_be() -> None:
    """Any number of parameters is no number of columns; the message names what is wrong."""
    for function, parameter in ((starred, r"\*items"), (keywords, r"\*\*items")):
        with pytest.raises(TypeError, match=rf"{parameter}.* of {function.__name__}"):
            batched(max_size=2)(function)


@pytest.mark.parametrize("thing", [staticmethod(body), classmethod(body), Named, 5, None])
def test_only_functions_are_batched(thing: Any) -> None:
    """A staticmethod goes outside; a class or a value is none."""
    with pytest.raises(TypeError, match="batched decorates a function"):
        batched(max_size=2)(thing)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((), {}, TypeError, "needs max_size="),
        ((), {"max_wait": 1.0}, TypeError, "needs max_size="),
        ((64,), {}, TypeError, "needs arguments: @batched\\(max_size=64\\)"),
        ((body,), {}, TypeError, "needs arguments: @batched\\(max_size=64\\)"),
        ((Fill,), {}, TypeError, "needs arguments: @batched\\(max_size=64\\)"),
        ((Fill(2),), {"max_size": 3}, TypeError, "not both"),
        ((Round(2),), {"max_wait": 1.0}, TypeError, "not both"),
        ((), {"max_size": 0}, ValueError, "max_size must be at least 1"),
        ((), {"max_size": True}, TypeError, "max_size must be an int"),
        ((), {"max_size": 2.0}, TypeError, "max_size must be an int"),
        ((), {"max_size": 2, "max_wait": -1.0}, ValueError, "max_wait must be seconds"),
        ((), {"max_size": 2, "max_wait": float("nan")}, ValueError, "max_wait must be seconds"),
        ((), {"max_size": 2, "max_wiat": 1.0}, TypeError, "max_wiat"),
    ],
)
def test_a_policy_that_cannot_be(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception], text: str
) -> None:
    """What is wrong is told where it is written, not at the first call."""
    with pytest.raises(error, match=text):
        batched(*args, **kwargs)


async def test_a_method_called_without_an_instance() -> None:
    """`Agent.select()` says that it wants one."""
    with pytest.raises(TypeError, match=r"Named\.who is a method: call it on an instance"):
        Named.who()


def passed_through(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Hidden:
    @passed_through
    @batched(max_size=2)
    async def who(self, xs: list[int]) -> list[int]:
        return xs


async def test_a_method_under_another_decorator() -> None:
    """Its object is no item: the error says which decorator comes first."""
    with pytest.raises(TypeError, match=r"Hidden\.who is hidden .*: write @batched above"):
        Hidden().who(1)


@batched(max_size=2)
async def echo(self: list[int]) -> list[int]:
    return self


async def test_a_function_whose_parameter_is_called_self() -> None:
    assert await echo(1) == 1


# ── tasks that are cancelled from outside ───────────────────────────────────────────────────────


class Pairs:
    @batched(max_size=3)
    async def together(self, xs: list[int]) -> list[int]:
        return xs

    @batched(max_size=1, max_concurrent_batches=2)
    async def apart(self, xs: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return xs

    @batched(max_size=10, max_wait=0.01)
    async def loop(self, xs: list[int]) -> list[Any]:
        return [asyncio.get_running_loop()] * len(xs)


def cancel_others(before: set["asyncio.Task[Any]"]) -> None:
    for task in asyncio.all_tasks() - before:
        task.cancel()


async def test_cancelling_all_tasks_loses_no_call() -> None:
    """The task that dispatches may be cancelled before its first step: another one takes over."""
    pairs, found = Pairs(), asyncio.Queue[int]()
    queue = Pairs.together._queue(pairs)  # type: ignore[attr-defined]
    before = asyncio.all_tasks()
    queue.join(pairs, (1,), found.put_nowait, "peer")
    cancel_others(before)
    queue.join(pairs, (2,), found.put_nowait, "peer")
    async with asyncio.timeout(30.0):
        assert [await found.get() for _ in range(2)] == [1, 2]


async def test_a_batch_that_is_cancelled_before_it_starts() -> None:
    """Its callers get an error, and its slot is free again."""
    pairs, found = Pairs(), asyncio.Queue[Any]()
    queue = Pairs.apart._queue(pairs)  # type: ignore[attr-defined]
    before = asyncio.all_tasks()
    for number in range(2):
        queue.join(pairs, (number,), found.put_nowait, "peer")
    # Behind the step that dispatches, and before the first step of the second batch.
    asyncio.get_running_loop().call_soon(cancel_others, before)
    async with asyncio.timeout(30.0):
        assert [type(await found.get()) for _ in range(2)] == [RemoteError] * 2
    assert await asyncio.gather(*(pairs.apart(number) for number in range(5))) == [*range(5)]


def test_a_dispatch_that_its_loop_has_not_run() -> None:
    """A queue that another loop has taken over is left alone by the first loop, should it go on."""
    pairs = Pairs()
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def begin() -> None:
        pairs.loop(1).cancel()  # type: ignore[attr-defined]
        first.stop()

    async def on_second() -> Any:
        asked = asyncio.ensure_future(pairs.loop(2))
        await asyncio.sleep(0)
        # Each step of the first loop's while the second one waits here.
        await asyncio.to_thread(lambda: first.run_until_complete(asyncio.sleep(0)))
        return await asked

    task = first.create_task(begin())
    first.run_forever()
    assert second.run_until_complete(on_second()) is second
    assert task.done()
    second.run_until_complete(second.shutdown_default_executor())
    first.close()
    second.close()
