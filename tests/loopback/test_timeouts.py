"""`aiorpc.timeout` bounds its block: calls end with CallTimeout, other waits with TimeoutError."""

import asyncio
import concurrent.futures
import contextlib
import gc
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
from hypothesis import given, settings, strategies as st

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, Group, RRef, call, create, remote, supervised, timeout
from aiorpc_torch.testing import Gate
from tests.support.slack import BEGUN

pytestmark = pytest.mark.usefixtures("world")

SHORT = 0.03
LONG = 60.0


class Waiting:
    """An object whose calls do not end by themselves."""

    def __init__(self) -> None:
        self.gate = Gate()

    async def passed(self, *_: Any) -> None:
        await self.gate.passed()

    async def items(self) -> AsyncIterator[int]:
        yield 1
        await self.gate.passed()

    @aiorpc.batched(aiorpc.Round(2))
    async def meet(self) -> None:
        pass


@contextlib.contextmanager
def ends(kind: type[BaseException], seconds: float = SHORT) -> Any:
    """Expect exactly that class, from a block of `timeout`, and in time."""
    begin = time.monotonic()
    with pytest.raises(kind) as raised:
        with timeout(seconds):
            yield
    assert type(raised.value) is kind
    assert seconds <= time.monotonic() - begin < LONG / 2


# ── what ends with which error ────────────────────────────────────────────────────────────────────


WAITS: dict[str, Callable[[], Awaitable[Any]]] = {
    "sleep": lambda: asyncio.sleep(LONG),
    "event": lambda: asyncio.Event().wait(),
    "future": lambda: asyncio.get_running_loop().create_future(),
    "task": lambda: asyncio.create_task(asyncio.sleep(LONG)),
    "gather": lambda: asyncio.gather(asyncio.sleep(LONG), asyncio.sleep(LONG)),
    "anyio": lambda: anyio.sleep(LONG),
    "shielded": lambda: asyncio.shield(asyncio.get_running_loop().create_future()),
}


@pytest.mark.promise("deadlines.waits")
@pytest.mark.parametrize("is_async", [False, True], ids=["with", "async with"])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
async def test_a_wait_ends_with_timeout_error(
    wait: Callable[[], Awaitable[Any]], is_async: bool
) -> None:
    """By `with` and `async with`, whatever it waits for; the task is not cancelled."""

    async def run() -> None:
        if is_async:
            async with timeout(SHORT):
                await wait()
        else:
            with timeout(SHORT):
                await wait()

    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"the block was not over within 0\.03 s") as raised:
        await run()
    assert type(raised.value) is TimeoutError
    assert time.monotonic() - begin < LONG / 2
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()
    await asyncio.sleep(0)


async def one_of(group: "Group[Waiting]") -> None:
    async for _ in remote(group).passed():
        pass


async def all_items(rref: RRef[Waiting]) -> None:
    async for _ in remote(rref).items():
        pass


async def mapped(group: "Group[Waiting]") -> None:
    async for _ in group.map(Waiting.passed, [1, 2]):
        pass


async def in_a_task(rref: RRef[Waiting]) -> None:
    await asyncio.create_task(awaited(rref))


async def awaited(rref: RRef[Waiting]) -> None:
    await remote(rref).passed()


CALLS: dict[str, Callable[[RRef[Waiting]], Awaitable[Any]]] = {
    "lone": lambda rref: remote(rref).passed(),
    "typed": lambda rref: call(rref, Waiting.passed),
    "function": lambda rref: call("main", asyncio.sleep, LONG),
    "create": lambda rref: create("main", asyncio.sleep, LONG),
    "stream": all_items,
    "batched": lambda rref: remote(rref).meet(),
    "any": lambda rref: remote(Group([rref]).any()).passed(),
    "map": lambda rref: mapped(Group([rref, rref])),
    "task": in_a_task,
    "gathered": lambda rref: asyncio.gather(awaited(rref), awaited(rref)),
    "lookup": lambda rref: aiorpc.lookup("never", on="main"),
    "lookup anywhere": lambda rref: aiorpc.lookup("never"),
    "members": lambda rref: aiorpc.members("never").wait(),
}


@pytest.mark.promise("deadlines.waits")
@pytest.mark.parametrize("made", CALLS.values(), ids=CALLS)
async def test_a_call_ends_with_call_timeout(made: Callable[[RRef[Waiting]], Any]) -> None:
    """Its own timer is first, also where its error takes some iterations of the loop."""
    rref = RRef(Waiting())
    with ends(CallTimeout):
        await made(rref)


@pytest.mark.promise("deadlines.waits")
@pytest.mark.parametrize("blocked", [False, True], ids=["free", "blocked"])
async def test_calls_of_groups_end_with_call_timeouts(blocked: bool) -> None:
    """In their GroupError, in a TaskGroup, and when the loop finds all timers due at once."""
    rref = RRef(Waiting())
    group = Group([rref, rref, rref])
    for made in (lambda: remote(group).passed(), lambda: one_of(group)):  # type: Any
        with pytest.raises(aiorpc.GroupError) as raised:
            await in_time(made, blocked)
        assert {type(each) for each in raised.value.exceptions} == {CallTimeout}

    async def in_tasks() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(in_a_task(rref))

    with pytest.raises(ExceptionGroup) as of_tasks:
        await in_time(in_tasks, blocked)
    assert {type(each) for each in of_tasks.value.exceptions} == {CallTimeout}


async def in_time(made: Callable[[], Awaitable[Any]], blocked: bool) -> None:
    """Wait for it in a block, and let the loop be busy at its deadline."""
    with timeout(BEGUN):
        waiting = asyncio.ensure_future(made())
        await asyncio.sleep(0)
        if blocked:
            time.sleep(BEGUN + SHORT)  # noqa: ASYNC251
        await waiting


async def test_a_call_whose_loop_was_blocked() -> None:
    """Both timers are due in one iteration: the call is first."""
    rref = RRef(Waiting())
    with ends(CallTimeout):
        waiting = asyncio.ensure_future(awaited(rref))
        await asyncio.sleep(0)
        time.sleep(2 * SHORT)  # noqa: ASYNC251
        await waiting


async def test_a_supervised_object_that_is_waited_for() -> None:
    """The wait is a part of the call."""
    made = await supervised("main", Waiting)
    with ends(CallTimeout):
        await remote(made).passed()


@pytest.mark.promise("deadlines.waits")
async def test_a_block_ends_though_its_call_was_caught() -> None:
    """Whoever goes on after CallTimeout has no time left."""
    rref = RRef(Waiting())
    with ends(TimeoutError):
        with contextlib.suppress(CallTimeout):
            await remote(rref).passed()
        await asyncio.sleep(LONG)


async def test_a_block_that_is_over_has_no_further_effect() -> None:
    """No timer and no cancellation is left, however it ended."""
    rref = RRef(Waiting())
    for kind in (None, LookupError, CallTimeout):
        with contextlib.suppress(LookupError, CallTimeout), timeout(SHORT):
            if kind is CallTimeout:
                await remote(rref).passed()
            if kind is not None:
                raise kind
    await asyncio.sleep(2 * SHORT)
    with pytest.raises(TimeoutError), timeout(0.0):
        await asyncio.sleep(LONG)
    await asyncio.sleep(SHORT)


async def test_code_that_waits_for_nothing_is_not_interrupted() -> None:
    """A block whose end comes before its deadline is noticed has ended in time."""
    with timeout(SHORT):
        time.sleep(2 * SHORT)  # noqa: ASYNC251
    await asyncio.sleep(0)


async def test_cleanup_may_wait() -> None:
    """The block is cancelled once, so that what closes it can end."""
    ended = False
    with ends(TimeoutError):
        try:
            await asyncio.sleep(LONG)
        finally:
            await asyncio.sleep(2 * SHORT)
            ended = True
    assert ended


async def test_a_cancelled_task_is_cancelled() -> None:
    """Also at the moment of the deadline: a cancellation from outside is no timeout."""

    async def wait() -> None:
        with timeout(SHORT):
            try:
                await asyncio.sleep(LONG)
            except asyncio.CancelledError:
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                raise

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(wait())
    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# ── nested ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("inner", [timeout, asyncio.timeout, anyio.fail_after])
async def test_an_outer_block_ends_the_inner_one(inner: Any) -> None:
    """The inner one does not take it for its own."""
    inner_error: list[BaseException] = []
    with ends(TimeoutError):
        try:
            scope = inner(LONG)
            if hasattr(scope, "__aenter__"):
                async with scope:
                    await asyncio.sleep(LONG)
            else:
                with scope:
                    await asyncio.sleep(LONG)
        except BaseException as exc:
            inner_error.append(exc)
            raise
    assert isinstance(inner_error[0], asyncio.CancelledError | TimeoutError)


@pytest.mark.parametrize("outer", [timeout, asyncio.timeout, anyio.fail_after])
async def test_an_inner_block_ends_alone(outer: Any) -> None:
    """The outer one goes on."""
    async with contextlib.AsyncExitStack() as stack:
        scope = outer(LONG)
        if hasattr(scope, "__aenter__"):
            await stack.enter_async_context(scope)
        else:
            stack.enter_context(scope)
        with ends(TimeoutError):
            await asyncio.sleep(LONG)
        await asyncio.sleep(SHORT)


bounds = st.lists(st.sampled_from([0.0, 0.02, 0.04, LONG, None]), min_size=1, max_size=4)


@settings(deadline=None, max_examples=20)
@given(bounds, st.sampled_from(["wait", "call", "both"]), st.booleans())
async def test_the_nearest_deadline_ends_whatever_is_inside(
    seconds: list[float | None], what: str, in_task: bool
) -> None:
    """However blocks are nested, also in a task of their own, and by the class of the wait."""
    rref = RRef(Waiting())

    async def wait() -> None:
        if what != "wait":
            with contextlib.suppress(*([CallTimeout] if what == "both" else [])):
                await remote(rref).passed()
        await asyncio.sleep(LONG if what != "call" else 0)

    async def nested(left: list[float | None]) -> None:
        if not left:
            await (asyncio.create_task(wait()) if in_task else wait())
            return
        with timeout(left[0]):
            await nested(left[1:])

    nearest = min((each for each in seconds if each is not None), default=LONG)
    if nearest == LONG:
        return
    with pytest.raises(TimeoutError) as raised:
        await nested(seconds)
    assert type(raised.value) is (CallTimeout if what == "call" else TimeoutError)
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()


# ── other places ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wait", ["wait_for", "serve"])
async def test_waits_of_the_worker_have_no_other_rule(
    world: aiorpc.types.Worker, wait: str
) -> None:
    """`wait_for` and `serve` end with the block."""
    waiting = asyncio.Event()

    async def never() -> None:
        waiting.set()
        await asyncio.Event().wait()

    with ends(TimeoutError):
        # A world of one has no peer: both return at once, and something else has to be awaited.
        if wait == "serve":
            await world.serve()
        await never()
    assert waiting.is_set()


async def test_a_thread_without_a_loop_bounds_calls() -> None:
    """As a deadline that they travel with: nothing else can be interrupted there."""

    def run() -> float | None:
        with timeout(LONG):
            return aiorpc.seconds_left()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        left = await asyncio.wrap_future(pool.submit(run))
    assert left is not None
    assert LONG / 2 < left <= LONG


async def test_a_block_is_entered_once() -> None:
    """A second entry would lose the deadline of the first."""
    block = timeout(LONG)
    with block, pytest.raises(RuntimeError, match="was entered already"):
        block.__enter__()
    assert aiorpc.seconds_left() is None


@pytest.mark.parametrize("seconds", ["1", float("nan"), True, object()])
async def test_seconds_are_a_number(seconds: Any) -> None:
    """Anything else is refused where it is written."""
    with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
        timeout(seconds)


# ── blocks that are not left where they were entered ──────────────────────────────────────────────


async def items_in_a_block(seconds: float) -> AsyncIterator[int]:
    with timeout(seconds):
        while True:
            yield 1


async def test_a_generator_that_is_left_early(world: aiorpc.types.Worker) -> None:
    """Its block ends with it: nothing is cancelled later, and later calls have no deadline."""
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, found: failures.append(found))
    async for _ in items_in_a_block(SHORT):
        break
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the loop closes it now
    with timeout(LONG):  # an enclosing block stays
        async for _ in items_in_a_block(SHORT):
            break
        gc.collect()
        await asyncio.sleep(2 * SHORT)
        left = aiorpc.seconds_left()
    assert left is not None
    assert left > LONG / 2
    assert aiorpc.seconds_left() is None
    assert await call(0, int) == 0
    assert failures == []


async def test_a_block_that_another_task_leaves() -> None:
    """It bounds nobody any more: neither the task that entered it, nor its child tasks."""
    block, gate = timeout(SHORT), asyncio.Event()

    async def enter() -> tuple[float | None, float | None]:
        block.__enter__()
        child = asyncio.create_task(later())
        await gate.wait()
        await asyncio.sleep(2 * SHORT)
        return aiorpc.seconds_left(), await child

    async def later() -> float | None:
        await gate.wait()
        return aiorpc.seconds_left()

    entering = asyncio.create_task(enter())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    block.__exit__(None, None, None)
    gate.set()
    assert await entering == (None, None)


async def test_a_task_that_was_made_in_a_block_keeps_nothing_of_it() -> None:
    """The result of the task that entered the block ends with it."""

    class Large:
        pass

    made: list[Any] = []

    async def parent() -> Any:
        with timeout(LONG):
            made.append(asyncio.create_task(asyncio.sleep(LONG)))
        large = Large()
        made.append(weakref.ref(large))
        return large

    await asyncio.create_task(parent())
    await asyncio.sleep(0)  # the loop itself holds the task that has just ended
    gc.collect()
    child, large = made
    assert large() is None
    child.cancel()
    await asyncio.wait([child])
