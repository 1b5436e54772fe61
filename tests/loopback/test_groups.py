"""Groups of several objects of one worker: every promise that needs no second process."""

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import pytest
import torch

import aiorpc_torch as aiorpc
from aiorpc_torch import (
    CallTimeout,
    Group,
    GroupError,
    QueueFull,
    RemoteError,
    RpcError,
    RRef,
    batched,
    call,
    create,
    each,
    fetch,
    remote,
    timeout,
)
from aiorpc_torch.autograd import context
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import Gate, connection
from aiorpc_torch.testing.limits import INLINE_BYTES
from aiorpc_torch.types import RemoteTraceback
from tests.support.group_members import (
    Counted,
    Custom,
    Loud,
    Node,
    Unpicklable,
    give_back,
    nodes,
)
from tests.support.raw_connections import SOON
from tests.support.slack import BEGUN
from tests.support.torch_sending import refuse_messages

pytestmark = pytest.mark.usefixtures("world")


async def gates(count: int = 3) -> tuple[Group[Gate], list[Any]]:
    group = await create([0] * count, Gate)
    return group, [remote(member) for member in group]


async def entered(group: Group[Gate]) -> None:
    for member in group:
        await remote(member).entered()


# ── awaited ─────────────────────────────────────────────────────────────────────────────────────


async def test_results_in_the_groups_order() -> None:
    """Also of plain `def`s, of batched methods, by `call`, and of a function that is no method."""
    group = await nodes()
    assert await remote(group).add(10) == [10, 11, 12]
    assert await remote(group).plain("x") == [(10, "x"), (11, "x"), (12, "x")]
    assert await remote(group).double(4) == [8, 8, 8]
    assert await call(group, Node.add, amount=1) == [11, 12, 13]
    assert await call(group, getattr_number) == [11, 12, 13]


def getattr_number(node: Node) -> int:
    return node.number


async def test_an_override_runs() -> None:
    mixed: Group[Any] = Group([await create(0, Node, 1), await create(0, Loud, 1)])
    assert await call(mixed, Node.add, 1) == [2, 200]


async def test_a_call_is_lazy_and_used_once() -> None:
    """Nothing is sent before the await; afterwards it is used up, also for iteration."""
    group = await nodes()
    before = stats().calls
    asked = remote(group).add(1)
    assert "add" in repr(asked)
    assert stats().calls == before
    assert await asked == [1, 2, 3]
    with pytest.raises(RuntimeError, match="awaited already"):
        await asked
    with pytest.raises(RuntimeError, match="awaited already"):
        aiter(asked)
    iterated = remote(group).add(1)
    assert sorted([result async for _, result in iterated]) == [2, 3, 4]
    with pytest.raises(RuntimeError, match="awaited already"):
        await iterated


async def test_a_call_that_is_never_awaited_warns() -> None:
    group = await nodes()
    with pytest.warns(RuntimeWarning, match="call of Node.add by 3 members.* was never awaited"):
        remote(group).add(1)


async def test_it_can_be_a_task() -> None:
    group = await nodes()
    assert await asyncio.create_task(remote(group).add(1)) == [1, 2, 3]
    assert await asyncio.gather(remote(group).add(1), call(group, Node.add, 1)) == [
        [2, 3, 4],
        [3, 4, 5],
    ]


async def test_each_member_counts() -> None:
    """n members are n calls in the counters."""
    group = await nodes(5)
    before = stats()
    await remote(group).add(1)
    assert stats().calls - before.calls == stats().served - before.served == 5


async def test_a_duplicate_is_called_twice() -> None:
    (one,) = await nodes(1)
    assert await remote(Group([one, one])).add(1) == [1, 2]


async def test_order_of_calls() -> None:
    """Group calls and lone calls of one object start in the order of their awaits."""
    group = await nodes()
    await asyncio.gather(
        remote(group[0]).note("a"),
        remote(group).note("b"),
        remote(group).note(torch.zeros(2 * INLINE_BYTES)),
        remote(group[0]).note("d"),
    )
    came = [
        args[0] if isinstance(args[0], str) else "c" for args, _ in await remote(group[0]).noted()
    ]
    assert came == ["a", "b", "c", "d"]


async def test_no_members() -> None:
    """An empty group gives nothing, and has no least busy member."""
    group: Group[Node] = Group([])
    assert await remote(group).add(1) == []
    assert await call(group, Node.add, 1) == []
    assert [pair async for pair in remote(group).add(1)] == []
    assert await create([], Node) == group
    for ask in (group.any, lambda: group.map(Node.add, [1])):
        with pytest.raises(ValueError, match="the Group is empty"):
            ask()


# ── arguments ───────────────────────────────────────────────────────────────────────────────────


async def test_arguments_are_encoded_once() -> None:
    """For all members, whatever else is among them."""
    group, counted = await nodes(), Counted()
    own = [Counted() for _ in group]
    await remote(group).note(counted, each(own), where=counted)
    assert counted.pickled == 1
    assert [one.pickled for one in own] == [1, 1, 1]
    for member in group:
        ((args, kwargs),) = (await fetch(member)).came
        assert args[0] is kwargs["where"]


@pytest.mark.parametrize("size", [3, 2 * INLINE_BYTES])
async def test_tensors_arrive(size: int) -> None:
    """Alone, nested and beside others; each member has a copy of its own."""
    group, x = await nodes(), torch.randn(size)
    await remote(group).note(x)
    await remote(group).note(x, {"x": x}, each([x, x + 1, x + 2]), y=x)
    for index, member in enumerate(group):
        ((one,), _), ((two, named, own), kwargs) = await remote(member).noted()
        assert all(torch.equal(x, found) for found in (one, two, named["x"], kwargs["y"]))
        assert torch.equal(own, x + index)
        one.zero_()
    assert x.any()


@pytest.mark.parametrize(
    "bad", [Unpicklable(), [Unpicklable()], each([1, 2, Unpicklable()]), [threading.Lock()]]
)
async def test_a_bad_argument_raises_plainly(bad: Any) -> None:
    """Nothing has run, and no call was counted."""
    group = await nodes()
    before = stats().calls
    for ask in (remote(group).note, lambda *args: call(group, Node.note, *args)):
        with pytest.raises((LookupError, TypeError), match="pickle"):
            await ask("good", bad)
    with pytest.raises((LookupError, TypeError), match="pickle"):
        await create([0, 0, 0], Node, bad)
    assert stats().calls == before
    assert await remote(group).noted() == [[], [], []]


async def test_a_bad_argument_of_an_iterated_call() -> None:
    group = await nodes()
    with pytest.raises(LookupError):
        aiter(remote(group).note(Unpicklable()))
    assert stats().in_flight == 0


async def test_rrefs_inside_are_usable_by_each() -> None:
    """Also as attributes of what is shared, and as values of `each`."""
    group = await nodes()
    other, last = await create(0, Node, 100), await create(0, Node, 200)
    assert await remote(group).add_to([other, last]) == [[101, 201], [102, 202], [103, 203]]
    assert await remote(group).add_to(each([[other], [last], [other, last]])) == [
        [104],
        [204],
        [105, 205],
    ]
    assert await remote(group[:1]).add_to(group[1:]) == [[2, 3]]


async def test_each_gives_every_member_its_own() -> None:
    """Positional and by keyword, of any iterable."""
    group = await nodes()
    await remote(group).note(each("abc"[i] for i in range(3)), b=each((1, [2], 3)), c=4)
    assert await remote(group).noted() == [
        [(("a",), {"b": 1, "c": 4})],
        [(("b",), {"b": [2], "c": 4})],
        [(("c",), {"b": 3, "c": 4})],
    ]
    assert await call(group, Node.add, each([10, 20, 30])) == [10, 21, 32]


async def test_each_of_a_tensor_gives_its_rows() -> None:
    group, batch = await nodes(), torch.randn(3, 2)
    found = await remote(group).plain(each(batch))
    assert all(torch.equal(row, x) for row, (_, x) in zip(batch, found, strict=True))


async def test_each_of_the_wrong_length() -> None:
    """It is a ValueError, and nothing has run."""
    group = await nodes()
    for ask in (remote(group).note(each([1, 2])), call(group, Node.note, x=each([]))):
        with pytest.raises(ValueError, match="values for 3 members"):
            await ask
    with pytest.raises(ValueError, match="2 values for 1 members"):
        await create([0], Node, each([1, 2]))
    assert await remote(group).noted() == [[], [], []]


@pytest.mark.parametrize("values", ["abc", b"abc", {"a": 1}, {1, 2, 3}, 7])
def test_each_refuses(values: Any) -> None:
    with pytest.raises(TypeError, match=r"each\(\) takes a sequence of values"):
        each(values)


async def test_each_elsewhere() -> None:
    """It is refused in calls of one object, inside other arguments, and as an item."""
    group = await nodes()
    value = each([1, 2, 3])
    asks = [
        remote(group[0]).note(value),
        remote(group.any()).note(value),
        call(0, len, value),
        create(0, Node, value),
        remote(group).note([value]),
        anext(group.map(Node.plain, [value])),
    ]
    for ask in asks:
        with pytest.raises(TypeError, match="must be a direct argument of a call of a group"):
            await ask
    with pytest.raises(TypeError, match="direct argument"):
        pickle.dumps(value)


# ── iterated ────────────────────────────────────────────────────────────────────────────────────


async def test_results_as_they_complete() -> None:
    """Each with its member, which is the group's own RRef."""
    group, opened = await gates()
    results = aiter(remote(group).passed())
    await entered(group)
    for index in (2, 0, 1):
        await opened[index].open()
        member, result = await anext(results)
        assert member is group[index]
        assert result is None
    with pytest.raises(StopAsyncIteration):
        await anext(results)
    with pytest.raises(StopAsyncIteration):
        await anext(results)


async def test_failures_come_after_the_successes() -> None:
    group = await nodes()
    found = []
    with pytest.raises(GroupError, match=r"^Node\.fail_if: 1 of 3 members failed") as raised:  # noqa: PT012
        async for member, result in remote(group).fail_if(1, LookupError, "here"):
            found.append((group.index(member), result))
    assert sorted(found) == [(0, 0), (2, 2)]
    assert repr(raised.value.results) == "[0, LookupError('here'), 2]"


@pytest.mark.parametrize("how", ["break", "raise", "aclose", "cancel"])
async def test_leaving_early_cancels_the_rest(how: str) -> None:
    """However the consumer leaves."""
    group, opened = await gates()
    first = asyncio.Event()

    async def consume() -> None:
        async for _ in remote(group).passed():
            first.set()
            if how == "break":
                break
            if how == "raise":
                raise KeyError(how)

    if how == "aclose":
        results = aiter(remote(group).passed())
    else:
        consuming = asyncio.create_task(consume())
    await entered(group)
    await opened[1].open()
    if how == "aclose":
        await anext(results)
        await results.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(results)
    else:
        await first.wait()
        consuming.cancel(how) if how == "cancel" else None
        await asyncio.wait([consuming])
        assert consuming.cancelled() or how != "cancel"
        assert how == "break" or consuming.cancelled() or consuming.exception()
    assert [await each_.cancelled(int(at != 1)) for at, each_ in enumerate(opened)] == [1, 0, 1]


async def test_one_consumer_at_a_time() -> None:
    group, opened = await gates(1)
    results = aiter(remote(group).passed())
    waiting = asyncio.ensure_future(anext(results))
    await entered(group)
    with pytest.raises(RuntimeError, match="another task waits"):
        await anext(results)
    await opened[0].open()
    assert (await waiting)[0] is group[0]


# ── failures ────────────────────────────────────────────────────────────────────────────────────


async def fails(group: Group[Node], number: int = 1, *what: Any) -> GroupError:
    with pytest.raises(GroupError) as raised:
        await remote(group).fail_if(number, *(what or (LookupError, "here")))
    return raised.value


async def test_a_group_error_has_all_results() -> None:
    """By position; its exceptions are remote ones, with the place of each in a note."""
    error = await fails(await nodes())
    (exc,) = error.exceptions
    assert error.results == [0, exc, 2]
    assert isinstance(exc, LookupError)
    assert exc.__notes__ == ["member 2 of 3, on worker 'main'"]
    assert isinstance(exc.__cause__, RemoteTraceback)
    assert isinstance(error, ExceptionGroup)
    assert not isinstance(error, RpcError)


async def test_all_members_are_waited_for() -> None:
    """A failure does not end the others."""
    node = await create(0, Node, 1)
    group, opened = await gates(1)
    both: Group[Any] = Group([node, *group])
    calling = asyncio.ensure_future(remote(both).passed())
    await entered(group)
    await asyncio.sleep(0)
    assert not calling.done()
    await opened[0].open()
    with pytest.raises(GroupError) as raised:
        await calling
    assert [type(each_) for each_ in raised.value.results] == [AttributeError, type(None)]


async def test_parts_keep_class_and_results() -> None:
    """`split`, `subgroup`, `derive` and `except*`."""
    group = await nodes()
    with pytest.raises(GroupError) as raised:
        await call(group, fail_variously)
    error = raised.value
    assert [type(exc) for exc in error.exceptions] == [KeyError, ValueError]
    keys, rest = error.split(KeyError)
    assert keys is not None
    assert rest is not None
    for part in (keys, rest, error.subgroup(ValueError), error.derive([KeyError("x")])):
        assert type(part) is GroupError
        assert part.results == error.results
    seen: list[Any] = []
    try:
        try:
            raise error
        except* KeyError as caught:
            seen.append(caught)
    except GroupError as left:
        seen.append(left)
    assert [type(part) for part in seen] == [GroupError, GroupError]
    assert all(part.results == error.results for part in seen)
    assert [len(part.exceptions) for part in seen] == [1, 1]


async def test_a_payload_that_is_refused_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member fails with the reason, awaited and iterated, although no answer comes."""
    group = await nodes(1)
    refused = torch.eye(3).to_sparse()  # torch has to send it
    refuse_messages(monkeypatch)
    for take in (awaited, iterated):
        await remote(group[0]).add(
            1
        )  # from then on, one call is sent within the step that makes it
        async with asyncio.timeout(SOON):
            with pytest.raises(GroupError) as raised:
                await take(remote(group).note(refused))
        assert [type(each) for each in raised.value.exceptions] == [RemoteError]
    assert stats().in_flight == 0


async def awaited(calls: Any) -> None:
    await calls


async def iterated(calls: Any) -> None:
    async for _ in calls:
        pass


def fail_variously(node: Node) -> Any:
    if node.number < 2:
        raise (KeyError, ValueError)[node.number](node.number)
    return node.number


class HoldsLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text, threading.Lock())


@pytest.mark.parametrize("way", ["call", "pickle", "copy"])
async def test_it_crosses_workers(way: str) -> None:
    """With its results and notes; a result that cannot be pickled arrives as its text."""
    group = await nodes()
    error: Any = None
    if way == "call":
        with pytest.raises(GroupError) as raised:
            await call(0, fail_in_a_group, group)
        error = raised.value
    else:
        own = await fails(group)
        own.add_note("a note")
        own.results[2] = group[2]
        error = copy.copy(own) if way == "copy" else pickle.loads(pickle.dumps(own))
        assert error.__notes__ == ["a note"]
    (exc,) = error.exceptions
    assert error.message == "Node.fail_if: 1 of 3 members failed; the first: LookupError: here"
    assert error.results[:2] == [0, exc]
    assert "RRef" in str(error.results[2])
    assert repr(exc) == "LookupError('here')"
    assert exc.__notes__ == ["member 2 of 3, on worker 'main'"]


async def fail_in_a_group(group: Group[Node]) -> None:
    try:
        await remote(group).fail_if(1, LookupError, "here")
    except GroupError as error:
        error.results[2] = group[2]
        raise


async def test_exceptions_that_cannot_be_pickled() -> None:
    """A member's arrives as RemoteError in the group, also in a group that travels on."""
    group = await nodes()
    error = await fails(group, 1, HoldsLock, "x")
    assert [type(exc) for exc in error.exceptions] == [RemoteError]
    with pytest.raises(GroupError) as raised:
        await call(0, fail_with_a_lock)
    (exc,) = raised.value.exceptions
    assert isinstance(exc, RemoteError)
    assert "HoldsLock" in str(exc)
    assert raised.value.results == [exc, 5]


def fail_with_a_lock() -> None:
    exc = HoldsLock("x")
    raise GroupError("f", [exc], [exc, 5])


async def test_an_exception_that_is_no_exception() -> None:
    """An ExceptionGroup cannot hold it: it arrives as RemoteError."""
    error = await fails(await nodes(), 1, Custom, "odd")
    (exc,) = error.exceptions
    assert isinstance(exc, RemoteError)
    assert isinstance(exc.__cause__, Custom)


@pytest.mark.parametrize("method", ["items", "items_in_thread"])
async def test_generators_are_refused(method: str) -> None:
    """Each member's TypeError says what to do, awaited and iterated."""
    group = await nodes()
    ask = getattr(remote(group), method)
    with pytest.raises(GroupError) as awaited:
        await ask(3)
    with pytest.raises(GroupError) as iterated:
        async for _ in ask(3):
            pass
    for exc in (*awaited.value.exceptions, *iterated.value.exceptions):
        assert isinstance(exc, TypeError)
        assert "iterate the members one by one" in str(exc)
    assert len(awaited.value.exceptions) == 3
    assert [item async for item in getattr(remote(group[0]), method)(2)] == [0, 1]


async def test_private_names_are_refused_at_once() -> None:
    group = await nodes()
    for proxy in (remote(group), remote(group.any())):
        with pytest.raises(AttributeError, match="private"):
            proxy._secret  # noqa: B018


# ── deadlines and cancellation ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["argument", "scope"])
async def test_a_late_member_is_a_timeout(how: str) -> None:
    """The others' results are there."""
    group, opened = await gates()
    for index in (0, 2):
        await opened[index].open()
    with pytest.raises(GroupError) as raised:  # noqa: PT012
        if how == "argument":
            await remote(group, timeout=BEGUN).passed()
        else:
            with timeout(BEGUN):
                await call(group, Gate.passed)
    (exc,) = raised.value.exceptions
    assert isinstance(exc, CallTimeout)
    assert exc.worker == "main"
    assert raised.value.results == [None, exc, None]
    assert await opened[1].cancelled(1) == 1


async def test_a_late_member_of_an_iterated_call() -> None:
    group, opened = await gates(2)
    await opened[1].open()
    found = []
    with pytest.raises(GroupError) as raised:  # noqa: PT012
        async for member, _ in remote(group, timeout=BEGUN).passed():
            found.append(member)
    assert found == [group[1]]
    assert [type(exc) for exc in raised.value.exceptions] == [CallTimeout]


async def test_a_deadline_that_is_over() -> None:
    """It is a plain CallTimeout: nothing was sent."""
    group = await nodes()
    before = stats().calls
    with timeout(0.0):
        for ask in (remote(group).add(1), call(group, Node.add, 1), create([0], Node)):
            with pytest.raises(CallTimeout, match="they were not sent"):
                await ask
        with pytest.raises(CallTimeout):
            aiter(remote(group).add(1))
        with pytest.raises(CallTimeout):
            await anext(group.map(Node.add, [1]))
    assert stats().calls == before


async def test_cancelling_cancels_every_member() -> None:
    group, opened = await gates()
    calling = asyncio.ensure_future(remote(group).passed())
    await entered(group)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert [await each_.cancelled(1) for each_ in opened] == [1, 1, 1]
    assert stats().in_flight == 0


async def test_an_anyio_scope_ends_it() -> None:
    """The scope reports its own deadline, which the members see as well."""
    group, opened = await gates()
    with anyio.move_on_after(BEGUN) as scope:
        await remote(group).passed()
    assert scope.cancelled_caught
    assert [await each_.cancelled(1) for each_ in opened] == [1, 1, 1]
    with anyio.fail_after(30):
        left = await call(Group([await create(0, Node)]), seconds_left)
    assert 0 < left[0] <= 30


async def seconds_left(_: Node) -> Any:
    return aiorpc.seconds_left()


# ── groups as values ────────────────────────────────────────────────────────────────────────────


async def test_a_group_is_a_sequence() -> None:
    group = await nodes()
    assert isinstance(group, Sequence)
    assert len(group) == 3
    assert [*group] == [group[0], group[1], group[2]]
    assert group[-1] in group
    assert group.index(group[1]) == 1
    assert [*reversed(group)] == [*group][::-1]
    assert isinstance(group[1:], Group)
    assert [*group[::2]] == [group[0], group[2]]
    assert await remote(group[1:]).add(0) == [1, 2]
    assert "3" in repr(group)
    for change in (lambda: group.__setitem__(0, group[1]), lambda: setattr(group, "x", 1)):
        with pytest.raises(AttributeError):
            change()
    with pytest.raises(TypeError, match="must be RRefs, got 3"):
        Group([group[0], 3])  # type: ignore[list-item]


async def test_equal_groups() -> None:
    """By their members, wherever the RRefs were."""
    group = await nodes()
    same = Group([*group])
    assert group == same == group[:]
    assert hash(group) == hash(same)
    assert group != group[:2]
    assert group != group[::-1]
    assert group != [*group]
    back = await call(0, give_back, group)
    assert isinstance(back, Group)
    assert back == group
    assert hash(back) == hash(group)


async def test_a_group_travels() -> None:
    """As an argument, in one, and as a result."""
    group = await nodes()
    holder = await create(0, Node, group)
    assert await remote((await fetch(holder)).number).add(1) == [1, 2, 3]
    assert await call(0, add_all, {"group": group}, 1) == [2, 3, 4]


async def add_all(groups: dict[str, Group[Node]], amount: int) -> list[int]:
    return await remote(groups["group"]).add(amount)


async def test_what_takes_no_group() -> None:
    group: Any = await nodes()
    for value in (group, group.any(), group[0].local_value()):
        with pytest.raises(TypeError, match=r"rref must be an RRef, .*, or its caller's RRef\(x\)"):
            await fetch(value)


@pytest.mark.promise("calls.many")
async def test_create_on_several_workers() -> None:
    """By rank and by name; a repeated worker gets two objects, each its own arguments."""
    group = await create([0, "main", 0], Node, each(iter("abc")), "x")
    assert isinstance(group, Group)
    assert [node.number for node in [await fetch(each_) for each_ in group]] == ["a", "b", "c"]
    assert len({*group}) == 3
    made = await create(["main"], make_node, 5)
    assert await remote(made).add(1) == [6]


async def make_node(number: int) -> Node:
    return Node(number)


@pytest.mark.promise("calls.many")
async def test_one_worker_or_many() -> None:
    """One gives an RRef, a list or tuple of one a Group; nothing gives an empty one."""
    for to in (["main"], ("main",), [0], range(1)):
        group = await create(to, Node, 5)
        assert isinstance(group, Group)
        assert await remote(group).add(1) == [6]
        assert await call(to, add_one, 5) == [6]
        assert [pair async for pair in call(to, add_one, 5)] == [("main", 6)]
    assert await create([], Node, 5) == Group(())
    assert await call([], add_one, 5) == []
    assert await remote(await create("main", Node, 5)).add(1) == 6
    assert await call(["main", 0], add_one, each([1, 2])) == [2, 3]


def add_one(number: int) -> int:
    return number + 1


@pytest.mark.parametrize("workers", [b"main", None, {"main"}, iter(["main"]), 1.5])
async def test_what_are_no_workers(workers: Any) -> None:
    """Neither one nor a list: the remedy is in the error."""
    for asked in (lambda: create(workers, Node), lambda: call(workers, add_one, 1)):
        with pytest.raises((TypeError, ValueError), match="a list or tuple of workers"):
            await asked()


async def test_create_on_an_unknown_worker() -> None:
    """Nothing is made."""
    before = stats().calls
    with pytest.raises(ValueError, match="no worker 'nobody' in this world"):
        await create(["main", "nobody"], Node)
    with pytest.raises(TypeError, match="must be callable"):
        await create(["main"], 3)  # type: ignore[arg-type]
    assert stats().calls == before


async def test_create_on_workers_of_which_some_fail() -> None:
    """The RRefs of the others are in the results."""
    with pytest.raises(GroupError) as raised:
        await create([0, 0, 0], fail_or_make, each([1, 0, 2]))
    first, failed, last = raised.value.results
    assert isinstance(failed, ZeroDivisionError)
    assert await remote(Group([first, last])).add(1) == [2, 3]


def fail_or_make(number: int) -> Node:
    return Node(number * number // number)


# ── any ─────────────────────────────────────────────────────────────────────────────────────────


async def test_any_takes_turns() -> None:
    """Idle members are called in turn, by `remote` and by `call`, across calls of `any`."""
    group = await nodes()
    assert [await remote(group.any()).add(0) for _ in range(4)] == [0, 1, 2, 0]
    assert [await call(group.any(), Node.add, 0) for _ in range(3)] == [1, 2, 0]
    proxy = remote(group.any())
    assert [await proxy.add(0) for _ in range(3)] == [1, 2, 0]
    assert [item async for item in remote(group.any()).items(3)] == [0, 1, 2]
    assert [item async for item in call(group.any(), Node.items, 3)] == [0, 1, 2]
    assert await remote(group.any()).add(0) == 0


async def test_any_chooses_when_it_starts() -> None:
    """Not when the call is made; and a call is used once."""
    group = await nodes(2)
    asked = [remote(group.any()).add(0) for _ in range(2)]
    assert await asked[1] == 0
    assert await asked[0] == 1
    with pytest.raises(RuntimeError, match="awaited already"):
        await asked[0]


class Fragile:
    """A member that counts its calls, and raises at once while it is broken."""

    def __init__(self) -> None:
        self.calls, self.is_broken = 0, False

    async def work(self) -> None:
        self.calls += 1
        if self.is_broken:
            raise LookupError("broken")
        await asyncio.sleep(0.005)

    async def set_broken(self, is_broken: bool) -> int:
        self.is_broken = is_broken
        return self.calls


@pytest.mark.promise("any.failing")
async def test_any_passes_over_members_that_fail() -> None:
    """A member whose calls raise at once is always idle, and gets no more than its share. It gets
    calls again when it works."""
    group = await create([0, 0, 0], Fragile)
    await remote(group[0]).set_broken(True)
    failures = 0

    async def ask(times: int) -> None:
        nonlocal failures
        for _ in range(times):
            try:
                await remote(group.any()).work()
            except LookupError:
                failures += 1

    await asyncio.gather(*(ask(50) for _ in range(6)))
    assert 0 < failures <= 30
    assert await remote(group[0]).set_broken(False) == failures
    await asyncio.gather(*(ask(50) for _ in range(6)))
    assert await remote(group[0]).set_broken(False) > failures + 20


class Queued:
    """A member with a queue of one call, which runs while its gate is closed."""

    def __init__(self, name: str) -> None:
        self.name, self.ran = name, 0
        self.gate = asyncio.Event()

    @batched(max_size=1, max_pending=1)
    async def work(self, xs: list[int]) -> list[str]:
        self.ran += 1
        await self.gate.wait()
        return [self.name for _ in xs]

    @batched(max_size=1, max_pending=1)
    async def items(self, xs: list[int]) -> AsyncIterator[list[str]]:
        self.ran += 1
        await self.gate.wait()
        yield [self.name for _ in xs]

    async def ask(self, other: RRef[Any]) -> str:
        self.ran += 1
        return await remote(other).work(0)

    async def broken(self) -> Any:
        self.ran += 1
        yield 1
        raise LookupError(self.name)

    async def open(self) -> int:
        self.gate.set()
        return self.ran


async def full_queue(name: str) -> tuple[RRef[Queued], list["asyncio.Future[str]"]]:
    """A member whose queue is full, and the calls that fill it."""
    rref = RRef(Queued(name))
    running = [asyncio.ensure_future(remote(rref).work(0))]
    async with asyncio.timeout(SOON):
        while rref.local_value().ran < 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
    running.append(asyncio.ensure_future(remote(rref).work(1)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await remote(rref, timeout=SOON).work(2)
    return rref, running


@pytest.mark.promise("any.refused")
async def test_any_calls_another_member_if_a_queue_is_full() -> None:
    """Another caller fills it. Only if all are full the call fails."""
    full, running = await full_queue("full")
    free = RRef(Queued("free"))
    await remote(free).open()
    group = Group([full, free])
    assert [await remote(group.any()).work(n) for n in range(8)] == ["free"] * 8
    with pytest.raises(QueueFull):
        await remote(Group([full, full]).any()).work(0)
    assert await remote(full).open() == 1
    assert await asyncio.gather(*running) == ["full", "full"]


class Held:
    """What the caller of a call holds."""


async def test_the_error_of_full_queues_keeps_nothing() -> None:
    """What its caller holds goes at once, without the collector of cycles."""

    async def fail(_: Held) -> str:
        try:
            return await remote(Group([full, full]).any()).work(0)
        except QueueFull:
            return "refused"

    full, running = await full_queue("full")
    held = Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        assert await fail(held) == "refused"
        del held
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()
    await remote(full).open()
    await asyncio.gather(*running)


@pytest.mark.promise("any.refused")
async def test_any_streams_from_another_member_if_a_queue_is_full() -> None:
    async def read(of: Any) -> list[str]:
        return [item async for item in remote(of, timeout=SOON).items(0)]

    full, free = RRef(Queued("full")), RRef(Queued("free"))
    await remote(free).open()
    running = [asyncio.create_task(read(full))]
    async with asyncio.timeout(SOON):
        while full.local_value().ran < 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
    running.append(asyncio.create_task(read(full)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await read(full)
    assert [await read(Group([full, free]).any()) for _ in range(4)] == [["free"]] * 4
    with pytest.raises(QueueFull):
        await read(Group([full, full]).any())
    assert await remote(full).open() == 1
    assert await asyncio.gather(*running) == [["full"]] * 2


@pytest.mark.promise("any.refused")
async def test_a_full_queue_elsewhere_is_no_refusal() -> None:
    """The method has run, and is not run again by another member."""
    full, running = await full_queue("full")
    group = Group([RRef(Queued("a")), RRef(Queued("b"))])
    with pytest.raises(QueueFull) as raised:
        await remote(group.any()).ask(full)
    assert raised.value.may_have_run
    assert sum(await remote(group).open()) == 1
    assert await remote(full).open() == 1
    await asyncio.gather(*running)


@pytest.mark.promise("any.failing")
async def test_a_stream_that_fails_is_a_failure() -> None:
    group = Group([RRef(Queued("a")), RRef(Queued("b"))])
    for name in ("a", "b", "a"):
        with pytest.raises(LookupError, match=name):
            assert [item async for item in remote(group.any()).broken()] == [1]
    assert group._least_busy._failures == {0: 2, 1: 1}


async def test_any_has_a_deadline() -> None:
    group, opened = await gates(1)
    with pytest.raises(CallTimeout):
        await remote(group.any(), timeout=BEGUN).passed()
    assert await opened[0].cancelled(1) == 1


# ── contexts, worlds and exports ────────────────────────────────────────────────────────────────


async def test_in_an_autograd_context() -> None:
    """Each member's call is recorded: gradients are those of the same sum made here."""
    group = await create([0, 0, 0], Node, each([1.0, 2.0, 3.0]))
    x = torch.ones(2, requires_grad=True)
    async with context() as ctx:
        scaled = await remote(group).scale(x)
        async for _, one in remote(group).scale(x):
            scaled.append(one)
        scaled.append(await remote(group.any()).scale(x))
        scaled += [one async for one in group.map(Node.scale, [x, x])]
        await ctx.backward([torch.stack(scaled).sum()])
        gradients = await ctx.gradients()
    expected = 2 * (1.0 + 2.0 + 3.0)
    extra = (gradients[x] - expected).tolist()
    assert extra[0] == extra[1]
    assert extra[0] in {a + b + c for a in (1, 2, 3) for b in (1, 2, 3) for c in (1, 2, 3)}


async def test_from_another_event_loop() -> None:
    """A thread of its own, and torn down with it."""
    group = await nodes()

    async def there() -> Any:
        found = [x async for _, x in group.map(Node.plain, range(5))]
        return await remote(group).add(1), await remote(group.any()).add(0), found

    added, chosen, found = await asyncio.to_thread(asyncio.run, there())
    assert added == [1, 2, 3]
    assert chosen in added
    assert found == [*range(5)]


async def test_an_abandoned_iterator_of_another_loop() -> None:
    """Its garbage may be collected in any thread."""
    group, opened = await gates(1)
    kept: list[Any] = []

    async def there() -> None:
        kept.append(aiter(remote(group).passed()))
        kept.append(group.map(Gate.cancelled, [0]))
        assert await anext(kept[1]) == 0
        await entered(group)

    await asyncio.to_thread(asyncio.run, there())
    kept.clear()
    assert await opened[0].cancelled(1) == 1


async def wait_unless_first(_: Node, number: int) -> None:
    if number:
        await asyncio.Event().wait()


@pytest.mark.parametrize("way", ["results", "map"])
async def test_garbage_changes_no_connection_in_place(way: str) -> None:
    """It may be collected while the connection handles another call."""
    group = await nodes()
    numbers = range(len(group))
    if way == "map":
        results: Any = group.map(wait_unless_first, numbers)
    else:
        results = aiter(call(group, wait_unless_first, each(numbers)))
    await anext(results)
    before = connection("main").pending
    del results
    assert connection("main").pending == before > 0
    await asyncio.sleep(0)
    assert connection("main").pending == 0
