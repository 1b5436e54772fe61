"""`where()`: the lines at which calls stand, in a world of one."""

import asyncio
import contextlib
import contextvars
import gc
import re
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import aiorpc_torch as aiorpc
from aiorpc_torch import Round, RRef, batched, exclusive, max_concurrency, remote
from aiorpc_torch.observe import where
from aiorpc_torch.testing import Gate
from aiorpc_torch.types import Standings
from tests.support.raw_connections import Tap
from tests.support.where import line_of, until_late, until_stands

pytestmark = pytest.mark.usefixtures("world")


class Service:
    def __init__(self) -> None:
        self.gate = Gate()
        self.lock = asyncio.Lock()
        self.thread_lock = threading.Lock()

    async def wait(self) -> None:
        await self.gate.passed()

    def wait_in_thread(self) -> None:
        self.inner()

    async def awaits_a_thread(self) -> None:
        await asyncio.to_thread(self.inner)

    def inner(self) -> None:
        self.gate.passed_in_thread()

    async def awaits_two_threads(self) -> None:
        await asyncio.gather(asyncio.to_thread(self.inner), asyncio.to_thread(self.inner))

    async def shields_a_thread(self) -> None:
        await asyncio.shield(asyncio.to_thread(self.inner))

    async def waits_for_an_executor(self) -> None:
        await asyncio.wait({asyncio.get_running_loop().run_in_executor(None, self.inner)})

    async def awaits_a_future(self) -> None:
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: later)
        self.task = asyncio.create_task(self.wait())
        self.task.add_done_callback(future.set_result)
        await future
        later = None  # its cell is empty before

    @batched(max_size=1)
    async def batch(self, items: list[int]) -> list[int]:
        await self.gate.passed()
        return items

    @batched(max_size=2)
    def batch_in_thread(self, items: list[int]) -> list[int]:
        self.gate.passed_in_thread()
        return items

    @batched(Round(3))
    def round(self, items: list[int]) -> None:
        pass

    async def awaits_a_batch(self) -> None:
        await self.batch(1)

    async def items(self) -> AsyncIterator[int]:
        while True:
            yield 1

    def items_in_thread(self) -> Iterator[int]:
        while True:
            yield 1

    async def slow_items(self) -> AsyncIterator[int]:
        await self.gate.passed()
        yield 1

    async def reads(self, other: Any) -> None:
        async for _ in remote(other).slow_items():
            pass

    async def hold(self) -> None:
        async with self.lock:
            await self.gate.passed()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        async with self.lock:
            yield

    async def enters(self, other: Any) -> None:
        async with remote(other).held():
            await self.gate.passed()

    async def enters_and_wants(self, other: Any) -> None:
        entering = asyncio.ensure_future(self.enters(other))
        await self.gate.entered()
        await asyncio.gather(entering, remote(other).want())

    async def enters_apart_and_wants(self, other: Any) -> None:
        self.entering = asyncio.ensure_future(self.enters(other))
        await self.gate.entered()
        await remote(other).want()

    @contextlib.asynccontextmanager
    async def with_gate(self) -> AsyncIterator[None]:
        await self.gate.passed()
        yield

    def manager(self) -> "Manager":
        return Manager(self)

    async def want(self) -> None:
        async with self.lock:
            pass

    async def acquire(self) -> None:
        await self.lock.acquire()
        await self.gate.passed()
        self.lock.release()

    def hold_in_thread(self) -> None:
        with self.thread_lock:
            self.gate.passed_in_thread()

    async def gathers(self, other: Any) -> None:
        await asyncio.gather(remote(other).wait(), remote(other).wait_in_thread())

    async def in_a_group(self, other: Any) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.one(other))

    async def one(self, other: Any) -> None:
        await remote(other).wait()

    async def leaves_behind(self, other: Any) -> None:
        self.task = asyncio.create_task(self.one(other))
        await self.gate.passed()

    async def locks_and_calls(self, other: Any) -> None:
        async with self.lock:
            await self.gate.passed()
            await remote(other).want()


class Manager:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def __aenter__(self) -> None:
        await self._service.gate.passed()

    async def __aexit__(self, *_: object) -> None:
        pass


@exclusive
class Alone(Service):
    pass


@max_concurrency(2)
class Two(Service):
    pass


class Calls:
    """Calls that are cancelled at the end, and the services at whose gates they wait."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Future[Any]] = []
        self._services: list[Service] = []

    def service(self, kind: type[Service] = Service) -> tuple[Service, Any]:
        self._services.append(found := kind())
        return found, RRef(found)

    def make(self, *calls: Any) -> None:
        self._tasks += map(asyncio.ensure_future, calls)

    async def end(self) -> None:
        for each in self._tasks:
            each.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for service in self._services:
            await service.gate.open()


@pytest.fixture
async def calls() -> AsyncIterator[Calls]:
    found = Calls()
    yield found
    await found.end()


def without_ages(found: object) -> list[str]:
    return re.sub(r", [\d.]+ s: ", ": ", str(found)).splitlines()


@pytest.mark.promise("where.lines")
async def test_a_coroutine(calls: Calls) -> None:
    """It is told in which line it awaits, and in which function of Python."""
    _, rref = calls.service()
    calls.make(remote(rref).wait())
    (call,) = await until_stands(at := line_of(Service.wait, "passed"))
    assert without_ages(call) == [f"Service.wait on worker 'main': waits at {at}, in Event.wait()"]
    assert (call.method, call.worker, call.caller) == ("Service.wait", "main", "main")
    assert call.age > 0
    assert call.waits_for == ()


@pytest.mark.promise("where.lines")
async def test_a_plain_def(calls: Calls) -> None:
    """Its own line is first, and the innermost last."""
    _, rref = calls.service()
    calls.make(remote(rref).wait_in_thread())
    lines = line_of(Service.wait_in_thread, "inner()"), line_of(Service.inner, "passed")
    found = await until_stands(*lines)
    text = f"runs in a thread at {lines[0]} -> {lines[1]}, in Event.wait()"
    assert without_ages(found) == [f"Service.wait_in_thread on worker 'main': {text}"]


@pytest.mark.promise("where.lines")
@pytest.mark.parametrize("method", ["awaits_a_thread", "shields_a_thread", "waits_for_an_executor"])
async def test_a_thread_of_an_executor(calls: Calls, method: str) -> None:
    """The line of the coroutine, then those of the thread."""
    _, rref = calls.service()
    calls.make(getattr(remote(rref), method)())
    lines = line_of(getattr(Service, method), "inner"), line_of(Service.inner, "passed")
    found = await until_stands(*lines)
    text = f"runs in a thread at {lines[0]} -> {lines[1]}, in Event.wait()"
    assert without_ages(found) == [f"Service.{method} on worker 'main': {text}"]


async def test_a_coroutine_that_gathers_threads_has_its_line(calls: Calls) -> None:
    """Before those of one of the threads."""
    _, rref = calls.service()
    calls.make(remote(rref).awaits_two_threads())
    lines = line_of(Service.awaits_two_threads, "gather"), line_of(Service.inner, "passed")
    await until_stands(f"runs in a thread at {lines[0]} -> {lines[1]}, in Event.wait()")


async def test_a_future_whose_callback_has_a_variable_without_a_value(calls: Calls) -> None:
    """Callbacks of the program are not looked into."""
    _, rref = calls.service()
    calls.make(remote(rref).awaits_a_future())
    await until_stands(f"waits at {line_of(Service.awaits_a_future, 'await future')}")


@pytest.mark.promise("where.queues")
async def test_a_batch_and_what_waits_behind_it(calls: Calls) -> None:
    service, rref = calls.service()
    calls.make(remote(rref).batch(1))
    await service.gate.entered()
    calls.make(remote(rref).batch(2))
    at = f"waits at {line_of(Service.batch, 'passed')}, in Event.wait()"
    found = await until_stands("waits for its batch")
    assert without_ages(found) == [
        f"Service.batch on worker 'main': is in a batch, which {at}",
        "Service.batch on worker 'main': waits for its batch; calls that wait: 1",
        f"  the batch before is Service.batch on worker 'main': {at}",
    ]


@pytest.mark.promise("where.queues")
async def test_a_batch_in_a_thread(calls: Calls) -> None:
    _, rref = calls.service()
    calls.make(remote(rref).batch_in_thread(1), remote(rref).batch_in_thread(2))
    at = f"runs in a thread at {line_of(Service.batch_in_thread, 'passed')}"
    found = await until_stands(at)
    assert [each.state for each in found] == ["is in a batch, which runs in a thread"] * 2


@pytest.mark.promise("where.queues")
async def test_a_round_that_is_not_full(calls: Calls) -> None:
    _, rref = calls.service()
    calls.make(remote(rref).round(1), remote(rref).round(2))
    await until_stands("waits for its round: 2 of 3 are there (main, main)")


@pytest.mark.promise("where.lines")
async def test_a_batch_that_a_method_awaits(calls: Calls) -> None:
    _, rref = calls.service()
    calls.make(remote(rref).awaits_a_batch())
    at = f"waits at {line_of(Service.batch, 'passed')}, in Event.wait()"
    found = await until_stands(at)
    own = line_of(Service.awaits_a_batch, "batch(1)")
    assert without_ages(found) == [
        f"Service.awaits_a_batch on worker 'main': waits at {own}",
        f"  it is in the batch Service.batch on worker 'main': {at}",
    ]


@pytest.mark.promise("where.queues")
async def test_a_turn(calls: Calls) -> None:
    """The call that has the turn is named; a batch waits for its turn too."""
    service, rref = calls.service(Alone)
    calls.make(remote(rref).wait())
    await service.gate.entered()
    calls.make(remote(rref).wait_in_thread(), remote(rref).batch(1))
    found = await until_stands("which waits for its turn")
    at = f"waits at {line_of(Service.wait, 'passed')}, in Event.wait()"
    assert without_ages(found) == [
        f"Service.wait on worker 'main': {at}",
        "Service.wait_in_thread on worker 'main': waits for its turn on the object",
        "  the turn is held by Service.wait on worker 'main': see above",
        "Service.batch on worker 'main': is in a batch, which waits for its turn on the object",
        "  the turn is held by Service.wait on worker 'main': see above",
    ]


@pytest.mark.promise("where.queues")
async def test_one_of_several_turns(calls: Calls) -> None:
    """Any of those that have one may end first."""
    service, rref = calls.service(Two)
    calls.make(remote(rref).wait(), remote(rref).wait())
    await service.gate.entered(2)
    calls.make(remote(rref).wait_in_thread())
    *_, call = await until_stands("waits for its turn")
    assert [(each.reason, each.is_certain) for each in call.waits_for] == [("turn", False)] * 2


@pytest.mark.promise("where.queues")
async def test_a_paused_object(calls: Calls) -> None:
    """It is told who has paused it."""
    _, rref = calls.service()
    async with aiorpc.paused(rref):
        outside = contextvars.Context()  # its own calls pass
        calls.make(asyncio.create_task(remote(rref).wait(), context=outside))
        await until_stands("waits: its object is paused, by worker 'main'")


@pytest.mark.promise("where.queues")
@pytest.mark.parametrize("name", ["items", "items_in_thread"])
async def test_a_stream_without_credit(calls: Calls, name: str) -> None:
    _, rref = calls.service()
    stream = aiter(getattr(remote(rref), name)())
    await anext(stream)
    found = await until_stands("waits until its caller takes items")
    at = line_of(Service.items, "yield")
    assert (at in str(found)) is (name == "items")
    await stream.aclose()


@pytest.mark.promise("where.queues")
async def test_all_threads_are_taken(calls: Calls) -> None:
    service, rref = calls.service()
    for _ in range(100):  # more than there are
        calls.make(remote(rref).wait_in_thread())
    await until_stands("waits for a thread: ", "plain `def`s run (`threads=` of the worker)")
    await service.gate.open()


@pytest.mark.promise("where.lines")
@pytest.mark.parametrize(("method", "count"), [("gathers", 2), ("in_a_group", 1), ("reads", 1)])
async def test_calls_of_a_call(calls: Calls, method: str, count: int) -> None:
    """Those that it awaits: by `gather`, in a group of tasks, as a stream."""
    _, rref = calls.service()
    other, other_rref = calls.service()
    calls.make(getattr(remote(rref), method)(other_rref))
    await other.gate.entered(count)
    call = next(each for each in await where() if each.method == f"Service.{method}")
    assert [(each.reason, each.is_certain) for each in call.waits_for] == [("call", True)] * count


@pytest.mark.promise("where.lines")
async def test_a_call_that_is_not_awaited(calls: Calls) -> None:
    """A task that the method has left behind is perhaps what it waits for."""
    service, rref = calls.service()
    other, other_rref = calls.service()
    calls.make(remote(rref).leaves_behind(other_rref))
    await service.gate.entered()
    await other.gate.entered()
    call = next(each for each in await where() if each.method == "Service.leaves_behind")
    assert not any(each.is_certain for each in call.waits_for)


@pytest.mark.promise("where.deadlock")
async def test_the_holder_of_a_lock(calls: Calls) -> None:
    """It is the call inside of `async with`, and no other of the same object."""
    service, rref = calls.service()
    calls.make(remote(rref).hold(), remote(rref).wait())
    await service.gate.entered(2)
    calls.make(remote(rref).want())
    found = await until_stands("waits for a lock")
    assert without_ages(found)[2:] == [
        f"Service.want on worker 'main': waits for a lock at {line_of(Service.want, 'with')}, in "
        "Lock.acquire()",
        "  the lock is held by Service.hold on worker 'main': see above",
    ]


@pytest.mark.promise("where.deadlock")
async def test_a_lock_that_a_remote_block_holds(calls: Calls) -> None:
    """It tells whose `async with` has entered the context manager that has the lock."""
    _, rref = calls.service()
    async with remote(rref).held():
        calls.make(remote(rref).want())
        found = without_ages(await until_stands("waits for a lock"))
    assert found[-1] == "  the lock is held by Service.held on worker 'main': see above"
    assert (
        "Service.held on worker 'main': is held by an `async with` of worker 'main' at "
        f"{line_of(Service.held, 'yield')}"
    ) in found


@pytest.mark.promise("where.deadlock")
async def test_the_call_whose_remote_block_holds_a_lock(calls: Calls) -> None:
    service, rref = calls.service()
    _, other = calls.service()
    calls.make(remote(rref).enters(other))
    await service.gate.entered()
    calls.make(remote(other).want())
    found = await until_stands("waits for a lock", "the `async with` is in Service.enters on ")
    want = next(each for each in found if each.method == "Service.want")
    (held,) = want.waits_for
    (enters,) = held.waits_for
    assert [(each.reason, each.is_certain) for each in (held, enters)] == [
        ("lock", True),
        ("block", True),
    ]


@pytest.mark.promise("where.deadlock")
@pytest.mark.parametrize("method", ["enters_and_wants", "enters_apart_and_wants"])
async def test_a_call_that_holds_and_wants_a_lock_in_two_tasks(calls: Calls, method: str) -> None:
    """It is no deadlock for sure: the block may end by itself."""
    service, rref = calls.service()
    other, other_rref = calls.service()
    calls.make(getattr(remote(rref), method)(other_rref))
    await service.gate.entered()
    found = await until_stands("waits for a lock", "deadlock, ")
    assert "perhaps a deadlock, " in str(found)
    await service.gate.open()
    async with other.lock:
        pass


@pytest.mark.promise("where.lines")
@pytest.mark.parametrize("kind", ["manager", "with_gate"])
async def test_a_context_manager_of_a_class(calls: Calls, kind: str) -> None:
    """While it is entered it waits by itself, and then for its caller."""
    service, rref = calls.service()
    block = getattr(remote(rref), kind)()
    entering = asyncio.ensure_future(block.__aenter__())
    await service.gate.entered()
    await until_stands(f"Service.{kind} on worker 'main', ", "waits at ")
    await service.gate.open()
    await entering
    await until_stands("is held by an `async with` of worker 'main'")
    await block.__aexit__(None, None, None)


@pytest.mark.promise("where.deadlock")
async def test_a_lock_without_a_block(calls: Calls) -> None:
    """The holder is a guess, since it has the same object."""
    service, rref = calls.service()
    calls.make(remote(rref).acquire())
    await service.gate.entered()
    calls.make(remote(rref).want())
    await until_stands("the lock may be held by Service.acquire on worker 'main': see above")


@pytest.mark.promise("where.deadlock")
async def test_a_lock_of_threads(calls: Calls) -> None:
    service, rref = calls.service()
    calls.make(remote(rref).hold_in_thread())
    await service.gate.entered()
    calls.make(remote(rref).hold_in_thread())
    await until_stands(
        f"waits for a lock, in a thread, at {line_of(Service.hold_in_thread, 'with')}",
        "the lock may be held by Service.hold_in_thread on worker 'main': see above",
    )


@pytest.mark.promise("where.deadlock")
async def test_a_task_of_no_call_holds_the_lock(calls: Calls) -> None:
    service, rref = calls.service()
    calls.make(service.hold())
    await service.gate.entered()
    calls.make(remote(rref).want())
    await until_stands("the lock is held by Service.hold on worker 'main': waits at ")


@pytest.mark.promise("where.late", "where.deadlock")
@pytest.mark.parametrize("way", ["block", "argument"])
async def test_the_error_of_a_deadlock(calls: Calls, way: str) -> None:
    """Two objects hold their locks and call each other: the error names the circle once."""
    one, rref = calls.service()
    two, other = calls.service()
    calls.make(remote(rref).locks_and_calls(other), remote(other).locks_and_calls(rref))
    for service in one, two:
        await service.gate.entered()
        await service.gate.open()
    await until_stands("deadlock, these calls wait for each other: ")
    block, argument = (None, 1.0) if way == "argument" else (1.0, None)

    async def want() -> None:
        async with aiorpc.timeout(block):
            await remote(rref, timeout=argument).want()

    text = str(await until_late(want, "\ndeadlock"))
    assert text.startswith("Service.want on worker 'main' timed out after 1 s; it may have run. It")
    assert line_of(Service.want, "with") in text
    circle = "Service.locks_and_calls on worker 'main' -> Service.want on worker 'main'"
    assert text.splitlines()[-1].endswith(f": {circle} -> {circle} -> {circle.partition(' -')[0]}")
    assert text.count("deadlock") == 1


def names(circle: Any) -> str:
    return " -> ".join(each.name for each in circle)


async def test_the_circle_as_values(calls: Calls) -> None:
    """Its last call is the first one again."""
    _, rref = calls.service()
    found = await where()
    assert found == Standings()
    assert str(found) == "no call waits"
    assert found.deadlocks() == []
    one, rref = calls.service()
    await one.gate.open()
    calls.make(remote(rref).locks_and_calls(rref))
    (circle,) = (await until_stands("deadlock, ")).deadlocks()
    assert [each.method for each in circle] == [
        *("Service.locks_and_calls", "Service.want", "Service.locks_and_calls"),
    ]
    assert repr([circle]) == f"[<deadlock, these calls wait for each other: {names(circle)}>]"
    assert repr(circle[0]).startswith("<Standing Service.locks_and_calls on worker 'main': waits")
    assert circle[0].id == circle[-1].id
    assert circle[-1].is_again


@pytest.mark.promise("where.late")
async def test_a_stream_and_a_group_that_are_late(calls: Calls) -> None:
    _, rref = calls.service()

    async def iterate() -> None:
        await anext(aiter(remote(rref, timeout=0.5).slow_items()))

    async def call_group() -> None:
        try:
            await remote(aiorpc.Group([rref]), timeout=0.5).wait()
        except aiorpc.GroupError as exc:
            raise exc.exceptions[0] from None

    await until_late(iterate, line_of(Service.slow_items, "passed"))
    await until_late(call_group, line_of(Service.wait, "passed"))


@pytest.mark.promise("where.late")
async def test_many_late_calls_share_a_question(calls: Calls) -> None:
    """A question is of at most 64: of some calls nothing is told, and their errors come too."""
    _, rref = calls.service()

    async def call_late() -> None:
        async with aiorpc.timeout(1.0):
            late = [asyncio.create_task(remote(rref).wait()) for _ in range(100)]  # type: ignore[arg-type]
        found = await asyncio.gather(*late, return_exceptions=True)
        assert all(isinstance(each, aiorpc.CallTimeout) for each in found)
        raise max(found, key=lambda each: len(str(each)))  # one of those that are told of

    await until_late(call_late, "It stood here")


@pytest.mark.promise("where.free")
@pytest.mark.usefixtures("world")
async def test_nothing_is_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a deadline that is answered in time sends what one without a deadline sends."""
    gate = Gate()
    rref = RRef(gate)
    await gate.open()
    tap = Tap(monkeypatch)
    for seconds in None, 60.0:
        async with aiorpc.timeout(seconds):
            await remote(rref).passed()
        await remote(rref, timeout=seconds).passed()
    assert tap.count("where") == 0
    await gate.shut()
    with pytest.raises(aiorpc.CallTimeout):
        await remote(rref, timeout=2.5).passed()  # asked about half a second before its end
    assert tap.count("where") == 2  # a question and an answer
    with pytest.raises(aiorpc.CallTimeout):
        await remote(rref, timeout=0.01).passed()  # too short
    assert tap.count("where") == 2


@pytest.mark.usefixtures("world")
async def test_a_call_that_ends_while_it_is_asked_about() -> None:
    """It waits no more, and its worker has no name for it."""
    gate = Gate()
    calling = asyncio.ensure_future(remote(RRef(gate)).passed())
    await gate.entered()
    opening = asyncio.ensure_future(gate.open())  # before the question is read
    assert await where() == ()
    await opening
    await calling


async def test_outside_of_a_world_it_is_empty() -> None:
    assert [*await asyncio.to_thread(asyncio.run, where())] == []


class Large:
    """What a method has in a local variable."""


class Working:
    """A plain method that runs until it is told to end."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def work(self) -> None:
        local = Large()
        self.kept = weakref.ref(local)
        self.began.set()
        self.may_end.wait()


async def test_locals_of_threads_are_not_kept() -> None:
    """Also without the garbage collector: they may be tensors."""
    working = Working()
    call = asyncio.ensure_future(remote(RRef(working)).work())
    await asyncio.to_thread(working.began.wait)
    gc.disable()
    try:
        assert [each.state for each in await where()] == ["runs in a thread"]
        working.may_end.set()
        await call
        async with asyncio.timeout(5):
            while working.kept() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


class Odd:
    """An awaitable that refers to the generator that awaits it."""

    def __init__(self) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()

    async def numbers(self) -> AsyncIterator[int]:
        await OddStep(self)
        yield 1

    async def work(self) -> int:
        self.items = self.numbers()
        (only,) = [each async for each in self.items]
        return only


class OddStep:
    def __init__(self, odd: Odd) -> None:
        self.items, self.began = odd.items, odd.began
        self.steps = odd.may_end.wait().__await__()

    def __await__(self) -> "OddStep":
        return self

    def __iter__(self) -> "OddStep":
        return self

    def __next__(self) -> object:
        self.began.set()
        return next(self.steps)


async def test_what_refers_to_whoever_awaits_it() -> None:
    odd = Odd()
    call = asyncio.ensure_future(remote(RRef(odd)).work())
    await odd.began.wait()
    async with asyncio.timeout(5):
        (found,) = await where()
    assert "numbers" in str(found)
    odd.may_end.set()
    assert await call == 1
