"""Calls in a world of one: real pickling, real threads, one process."""

import asyncio
import gc
import re
import sys
import time
import weakref
from typing import Any

import pytest
import torch
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch import CallTimeout, NotInWorld, RRef, call, create, fetch, remote
from aiorpc_torch.observe import stats
from aiorpc_torch.testing import Gate
from tests.support import actors
from tests.support.actors import Batching, Counter, Failing, Loud, Notes, Sleeper
from tests.support.slack import BEGUN

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.promise("calls.where")
async def test_def_and_async_def() -> None:
    """A method is awaited, whichever kind it is, with arguments and defaults."""
    counter = await create("main", Counter, start=5)
    assert await remote(counter).add(2) == 7
    assert await remote(counter).aadd(amount=3) == 10
    assert await remote(counter).add() == 11
    assert await remote(counter).on_loop()
    assert await remote(counter).thread() != "MainThread"


async def test_tensors_travel() -> None:
    """Tensors arrive equal, and are not the sender's own."""
    counter = await create("main", Counter, 3)
    tensor = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(await remote(counter).scale(tensor), tensor * 3)


@pytest.mark.promise("calls.addresses")
@pytest.mark.parametrize("worker", ["main", 0])
async def test_call_by_name_rank_and_info(worker: str | int) -> None:
    """A worker is a name, a rank or torch's WorkerInfo."""
    assert torch.equal(await call(worker, torch.add, torch.ones(2), 1), torch.full((2,), 2.0))
    assert await call(rpc.get_worker_info("main"), actors.name_of_worker) == "main"


@pytest.mark.promise("calls.overrides")
async def test_typed_method_call_is_virtual() -> None:
    """`call(rref, Base.method)` runs the override, as a method call does."""
    loud = await create("main", Loud, 1)
    assert await call(loud, Counter.add, 1) == 200
    assert await call(loud, Counter.aadd, 1) == 3


async def test_function_of_an_object() -> None:
    """A function that is no method gets the object behind the RRef."""
    counter = await create("main", Counter, 4)
    assert await call(counter, value_of) == 4


def value_of(counter: Counter) -> int:
    return counter.value


@pytest.mark.promise("calls.create")
async def test_create_raises_what_the_constructor_raises() -> None:
    """The error comes with the await, not at the first use."""
    with pytest.raises(KeyError, match="no such model"):
        await create("main", Failing)


async def test_create_with_a_factory() -> None:
    """Any callable makes an object, an async def too."""
    assert await remote(await create("main", make_counter, 5)).add() == 6


async def make_counter(start: int) -> Counter:
    await asyncio.sleep(0)
    return Counter(start)


@pytest.mark.promise("calls.fetch")
async def test_fetch() -> None:
    """The object itself on its owner."""
    assert (await fetch(await create("main", Counter, 8))).value == 8
    assert await fetch(RRef([1, 2])) == [1, 2]


@pytest.mark.promise("calls.lifetime")
async def test_object_lives_as_long_as_its_rref() -> None:
    """Nothing of ours keeps a remote object alive."""
    counter = Counter()
    alive = weakref.ref(counter)
    rref = RRef(counter)
    assert await remote(rref).add() == 1
    del counter, rref
    for _ in range(1000):
        gc.collect()
        if alive() is None:
            break
        await asyncio.sleep(0.01)
    assert alive() is None


async def test_a_call_keeps_nothing_that_it_has_awaited() -> None:
    """A method that drops what its first `await` has given frees it, while it waits again."""
    assert await call("main", drops_what_it_has_awaited)


async def drops_what_it_has_awaited() -> bool:
    future: asyncio.Future[Counter] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, Counter())
    gone = weakref.ref(await future)
    del future
    await asyncio.sleep(0.01)
    return gone() is None


@pytest.mark.promise("calls.awaited_results")
async def test_plain_future_and_hidden_coroutine() -> None:
    """A def may return a torch Future or a coroutine: the caller gets the result."""
    counter = await create("main", Counter)
    assert await remote(counter).later() == "later"
    # Many, with threads that change often: the one that hands the coroutine over may still be in
    # the context of the call when the loop takes the coroutine's first step.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        calls = [remote(counter).plain_def_coroutine() for _ in range(1000)]
        assert max(await asyncio.gather(*calls)) == 10_000
    finally:
        sys.setswitchinterval(interval)


async def test_async_execution_through_us() -> None:
    """`async_execution` functions are also called through `call`, and awaited locally."""
    assert await call("main", actors.add_slowly, 2, 3) == 5
    assert await actors.add_slowly(1, 1) == 2


# ── order, concurrency, cancellation, deadlines ─────────────────────────────────────────────────


@pytest.mark.promise("order.start")
async def test_calls_start_in_order() -> None:
    """Between one caller and one callee, calls start in the order in which they were sent."""
    notes = await create("main", Notes)
    await asyncio.gather(*(remote(notes).note(number) for number in range(500)))
    assert await remote(notes).noted() == list(range(500))


@pytest.mark.promise("order.slow")
async def test_a_slow_call_delays_no_other() -> None:
    """While one waits others are answered."""
    gate = await create("main", Gate)
    waiting = asyncio.create_task(remote(gate).passed())
    await remote(gate).entered()
    assert not waiting.done()
    await remote(gate).open()
    await waiting


@pytest.mark.promise("deadlines.cancel")
async def test_cancelling_the_caller_cancels_the_callee() -> None:
    """The remote coroutine sees CancelledError."""
    gate = await create("main", Gate)
    waiting = asyncio.create_task(remote(gate).passed())
    await remote(gate).entered()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await remote(gate).cancelled(0) == 1


@pytest.mark.promise("rounds.leave")
async def test_cancelled_caller_leaves_a_forming_round() -> None:
    """A contribution that is cancelled before the round is complete is not in it."""
    batching = await create("main", Batching)
    gone = asyncio.create_task(remote(batching).total(1000))
    await asyncio.sleep(0)
    first = asyncio.create_task(remote(batching).total(1))
    await asyncio.sleep(0)
    gone.cancel()
    rest = [asyncio.create_task(remote(batching).total(n)) for n in (2, 3)]
    assert await asyncio.gather(first, *rest) == [6, 6, 6]


@pytest.mark.promise("exceptions.attributes", "deadlines.call")
async def test_timeout_of_a_call() -> None:
    """`remote(..., timeout=)` raises CallTimeout, a TimeoutError, and cancels the callee."""
    gate = await create("main", Gate)
    with pytest.raises(CallTimeout) as raised:
        await remote(gate, timeout=BEGUN).passed()
    assert isinstance(raised.value, TimeoutError)
    expected = rf"Gate\.passed on worker 'main' timed out after {BEGUN} s; it may have run"
    assert re.match(expected, str(raised.value))
    assert (raised.value.worker, raised.value.method) == ("main", "Gate.passed")
    assert await remote(gate).cancelled(0) == 1


@pytest.mark.promise("deadlines.nested")
async def test_timeout_of_a_block_travels() -> None:
    """What is left of the caller's time bounds the callee's own calls."""
    with aiorpc.timeout(30.0):
        left = await call("main", actors.remaining)
    assert left is not None
    assert 0.0 < left < 30.0
    assert await call("main", actors.remaining) is None


@pytest.mark.promise("deadlines.late")
async def test_expired_deadline_sends_nothing() -> None:
    """A call after the deadline raises at once."""
    with aiorpc.timeout(0.0), pytest.raises(CallTimeout, match="before the call") as raised:
        await call("main", actors.pid)
    assert (raised.value.worker, raised.value.method) == ("main", "pid")


@pytest.mark.promise("exceptions.attributes")
async def test_timeout_of_a_typed_call_names_the_class() -> None:
    """The error of `call(rref, Class.method)` names the class, also for a stream."""
    gate = await create("main", Gate)
    with aiorpc.timeout(0.05), pytest.raises(CallTimeout, match=r"^Gate\.passed on") as raised:
        await call(gate, Gate.passed)
    assert raised.value.method == "Gate.passed"
    streams = await create("main", actors.Streams)
    with aiorpc.timeout(0.05), pytest.raises(CallTimeout, match=r"^Streams\.follow on worker"):
        _ = [item async for item in call(streams, actors.Streams.follow)]


async def test_threads_start_tuned() -> None:
    """A method's thread is told the loop's intra-op thread count."""
    counter = await create("main", Counter)
    counts = await asyncio.gather(*(remote(counter).threads() for _ in range(40)))
    assert set(counts) == {torch.get_num_threads()}


@pytest.mark.promise("calls.where")
async def test_defs_run_in_parallel(tmp_path) -> None:
    """Blocked plain methods block neither each other nor coroutines."""
    sleeper, counter = await create("main", Sleeper), await create("main", Counter)
    release = tmp_path / "release"
    blocked = [asyncio.create_task(remote(sleeper).block(str(release))) for _ in range(12)]
    assert await remote(counter).aadd() == 1
    assert await remote(counter).add() == 2
    release.touch()
    await asyncio.gather(*blocked)


@pytest.mark.promise("calls.coroutines_need_no_thread")
async def test_many_concurrent_sleeps() -> None:
    """Coroutines that wait hold no threads."""
    sleeper = await create("main", Sleeper)
    start = time.monotonic()
    await asyncio.gather(*(remote(sleeper).sleep(0.2) for _ in range(300)))
    assert time.monotonic() - start < 10  # one after the other: 60 s


# ── batched ─────────────────────────────────────────────────────────────────────────────────────


async def test_batched_method() -> None:
    """Each caller gets its own answer, and the function sees many callers at once."""
    batching = await create("main", Batching)
    results = await asyncio.gather(*(remote(batching).double(n) for n in range(100)))
    assert results == [2 * n for n in range(100)]
    sizes = await remote(batching).batch_sizes()
    assert sum(sizes) == 100
    assert max(sizes) <= 8


@pytest.mark.promise("batching.defaults")
async def test_batched_in_thread_with_defaults() -> None:
    """A batched plain def runs in a thread; defaults are filled in for each caller."""
    batching = await create("main", Batching)
    calls = [remote(batching).double_in_thread(1), remote(batching).double_in_thread(2, offsets=5)]
    assert await asyncio.gather(*calls) == [2, 9]


async def test_batched_rows_static_and_typed() -> None:
    """Tensor rows, static methods, and the typed form."""
    batching = await create("main", Batching)
    rows = await asyncio.gather(*(remote(batching).rows(torch.full((2,), n)) for n in range(3)))
    assert [row.tolist() for row in rows] == [[0, 0], [2, 2], [4, 4]]
    assert await call("main", Batching.static_double, 4) == 8
    assert await call(batching, Batching.double, 4) == 8


async def test_batched_body_raises_for_each() -> None:
    """The class and arguments of a batched function's exception reach every caller."""
    batching = await create("main", Batching)
    results = await asyncio.gather(
        *(remote(batching).broken(n) for n in range(3)), return_exceptions=True
    )
    assert all(isinstance(r, LookupError) and r.args[0] == "the body" for r in results)
    assert len({id(r) for r in results}) == 3


@pytest.mark.promise("batching.local")
async def test_local_and_remote_callers_share_a_queue() -> None:
    """The owner's own coroutines join the same rounds."""
    batching = Batching()
    rref = RRef(batching)
    assert await asyncio.gather(
        batching.total(1), remote(rref).total(2), remote(rref).total(3)
    ) == [6, 6, 6]


# ── mistakes ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("calls.mistakes")
async def test_private_names_are_refused() -> None:
    """At the call site, and by the callee if a caller goes round that."""
    counter = await create("main", Counter)
    with pytest.raises(AttributeError, match="private"):
        remote(counter)._secret  # noqa: B018
    with pytest.raises(AttributeError, match="private"):
        await call(counter, Counter._secret)


@pytest.mark.promise("calls.refusals")
async def test_missing_and_not_callable() -> None:
    """What is not there or not a method says so."""
    counter = await create("main", Counter)
    with pytest.raises(AttributeError, match="nope"):
        await remote(counter).nope()
    with pytest.raises(TypeError, match="not a method"):
        await remote(counter).attribute()


@pytest.mark.promise("calls.mistakes")
async def test_bad_arguments_raise_at_the_call() -> None:
    """An argument that cannot be pickled, an unknown worker, a thing that is no RRef."""
    counter = await create("main", Counter)
    with pytest.raises(TypeError, match="pickle"):
        await remote(counter).add(n for n in ())
    with pytest.raises(ValueError, match=r"no worker 'nobody'.*main"):
        await call("nobody", actors.pid)
    with pytest.raises(TypeError, match="RRef"):
        remote(3.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be callable"):
        await call("main", 3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"missing|unexpected"):
        await remote(counter).add(nonsense=1)
    assert await remote(counter).add() == 1, "nothing was lost by the mistakes"


async def test_result_that_cannot_be_pickled() -> None:
    """The caller learns it, and the worker goes on."""
    counter = await create("main", Counter)
    with pytest.raises(TypeError, match="pickle") as raised:
        await remote(counter).fails_to_pickle()
    assert "fails_to_pickle" in "".join(raised.value.__notes__)
    assert await remote(counter).add() == 1


async def test_argument_that_cannot_be_read() -> None:
    """It fails as an answer, and calls that follow are not held back."""
    with pytest.raises(ZeroDivisionError):
        await call("main", print, Unreadable())
    assert await call("main", actors.pid)


class Unreadable:
    def __reduce__(self):
        return divide, (1, 0)


def divide(a: int, b: int) -> float:
    return a / b


@pytest.mark.promise("worlds.one")
async def test_second_world_is_refused() -> None:
    """One world at a time."""
    with pytest.raises(RuntimeError, match="already"):
        async with aiorpc.local_world(0):
            pass


async def test_reprs() -> None:
    """What a user may print shows its state."""
    counter = await create("main", Counter)
    assert repr(remote(counter)) == "<remote object on main>"
    assert "max_size=8" in repr(Batching.double)


class TestOutside:
    """No world."""

    @pytest.fixture
    def world(self) -> None:
        """None."""

    @pytest.mark.promise("calls.not_in_world")
    async def test_not_serving(self) -> None:
        """Every way to call says what to do."""
        for mistake in (call("main", actors.pid), create("main", Counter)):
            with pytest.raises(NotInWorld, match="enter worker"):
                await mistake


@pytest.mark.promise("order.one_message")
async def test_a_turn_of_calls_is_one_message() -> None:
    """Calls made in one loop iteration travel in one message, and so do their results."""
    counter = await create("main", Counter)
    before = stats().messages
    results = await asyncio.gather(*(remote(counter).aadd() for _ in range(100)))
    assert results == list(range(1, 101))
    assert 0 < stats().messages - before <= 2, "the first leaves at once, the rest together"


@pytest.mark.promise("transport.loops")
async def test_calls_from_another_loop() -> None:
    """A thread with an event loop of its own may call too."""
    counter = await create("main", Counter)

    async def elsewhere() -> list[int]:
        return await asyncio.gather(*(remote(counter).aadd() for _ in range(20)))

    results = await asyncio.to_thread(asyncio.run, elsewhere())
    assert results == list(range(1, 21))


@pytest.mark.promise("transport.large")
async def test_large_tensors_among_small_calls() -> None:
    """A call with large tensors goes alone; the order stays."""
    notes = await create("main", Notes)
    items = [torch.full((50_000,), n) if n % 5 == 0 else n for n in range(20)]
    await asyncio.gather(*(remote(notes).note(item) for item in items))
    noted = await remote(notes).noted()
    assert [int(item[0]) if isinstance(item, torch.Tensor) else item for item in noted] == list(
        range(20)
    )


class Front:
    """Plain methods that return a call which is to be awaited."""

    def __init__(self, counter: RRef[Counter]) -> None:
        self.counter = counter

    def lone(self) -> Any:
        return remote(self.counter).aadd(1)

    def retried(self) -> Any:
        return remote(self.counter, retries=1).aadd(1)

    def grouped(self) -> Any:
        return remote(aiorpc.Group([self.counter])).aadd(1)

    def ours(self) -> Any:
        return self._ours()

    async def _ours(self) -> int:
        return 0


async def test_what_a_plain_method_returns_is_awaited() -> None:
    """A coroutine of whatever kind, as `return await` would."""
    front = remote(RRef(Front(RRef(Counter()))))
    found = [await front.lone(), await front.retried(), await front.grouped(), await front.ours()]
    assert found == [1, 2, [3], 0]
