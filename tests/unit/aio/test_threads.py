"""`DaemonThreadPool`, `ThreadCache` and `run_in_thread`: order, no task delayed, lost or leaked."""

import asyncio
import contextlib
import functools
import gc
import os
import queue
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from aiorpc_torch._aio.threads import DaemonThreadPool, ThreadCache, run_in_thread
from aiorpc_torch._torch.thread_state import set_intra_op_threads

SOON = 30.0  # seconds after which something will never happen


class GatedPool:
    """A thread pool and a gate at which its tasks wait."""

    def __init__(self, size: int) -> None:
        self.threads = DaemonThreadPool(size, lambda: set_intra_op_threads(torch.get_num_threads()))
        self.gate = threading.Event()
        self.started: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def quick(self, number: int) -> Callable[[], None]:
        return functools.partial(self.ended.put, number)

    def blocked(self, number: int) -> Callable[[], None]:
        def task() -> None:
            self.started.put(number)
            assert self.gate.wait(SOON)
            self.ended.put(number)

        return task


@pytest.fixture
def pool(request) -> Iterator[GatedPool]:
    pool = GatedPool(request.param)
    yield pool
    pool.gate.set()
    assert pool.threads.close(SOON) == 0


def of(size: int):
    return pytest.mark.parametrize("pool", [size], indirect=True)


def take(ended: "queue.SimpleQueue[int]", count: int) -> list[int]:
    return [ended.get(timeout=SOON) for _ in range(count)]


@pytest.mark.promise("order.threads")
@of(1)
def test_tasks_start_in_order(pool: GatedPool) -> None:
    """One thread takes one after the other, whether they come together or one by one."""
    pool.threads.submit(*[pool.quick(number) for number in range(50)])
    for number in range(50, 100):
        pool.threads.submit(*(pool.quick(number),))
    assert take(pool.ended, 100) == list(range(100))


@pytest.mark.promise("order.threads")
@of(4)
def test_the_only_free_thread_keeps_the_order(pool: GatedPool) -> None:
    """However many others there are that are blocked."""
    pool.threads.submit(*[pool.blocked(-number) for number in range(3)])
    take(pool.started, 3)
    pool.threads.submit(*[pool.quick(number) for number in range(100)])
    assert take(pool.ended, 100) == list(range(100))


@of(2)
@pytest.mark.parametrize("pause", [0.0, 0.005])
def test_a_blocked_task_holds_back_none(pool: GatedPool, pause: float) -> None:
    """Whether the next one comes at once, as the blocked one has just started, or later."""
    pool.threads.submit(*(pool.blocked(0),))
    assert take(pool.started, 1) == [0]
    time.sleep(pause)
    pool.threads.submit(*(pool.quick(1),))
    assert take(pool.ended, 1) == [1]


@of(4)
def test_a_task_that_comes_with_a_blocked_one(pool: GatedPool) -> None:
    """Submitted together, and taken by the same thread or not."""
    pool.threads.submit(*[pool.blocked(0), pool.quick(1), pool.blocked(2), pool.quick(3)])
    assert sorted(take(pool.ended, 2)) == [1, 3]


@of(8)
def test_all_threads_are_used_when_all_block(pool: GatedPool) -> None:
    """As many run at once as there may be, and not one more; the rest waits."""
    pool.threads.submit(*[pool.blocked(number) for number in range(12)])
    assert sorted(take(pool.started, 8)) == list(range(8))
    assert pool.started.empty()
    pool.gate.set()
    assert sorted(take(pool.ended, 12)) == list(range(12))


@of(8)
def test_one_by_one_all_threads_are_used_too(pool: GatedPool) -> None:
    """Each task that blocks is found to block, however quickly the next one follows."""
    for number in range(8):
        pool.threads.submit(*(pool.blocked(number),))
        assert take(pool.started, 1) == [number]


@of(8)
def test_tasks_that_wait_for_each_other(pool: GatedPool) -> None:
    """Eight that meet at a barrier get eight threads."""
    barrier = threading.Barrier(8)

    def meet() -> None:
        barrier.wait(SOON)
        pool.ended.put(0)

    for _ in range(3):
        pool.threads.submit(*[meet] * 8)
        take(pool.ended, 8)


@of(4)
def test_nothing_is_lost_in_a_storm(pool: GatedPool) -> None:
    """Several threads submit at once, in lots of any size."""

    def submit(first: int, size: int) -> None:
        for start in range(first, first + 1000, size):
            end = min(start + size, first + 1000)
            pool.threads.submit(*[pool.quick(number) for number in range(start, end)])

    storm = [
        threading.Thread(target=submit, args=(1000 * each, size))
        for each, size in enumerate((1, 2, 7, 100))
    ]
    for thread in storm:
        thread.start()
    ended = take(pool.ended, 4000)
    for thread in storm:
        thread.join()
    assert sorted(ended) == list(range(4000))
    assert pool.ended.empty()


@of(4)
def test_a_lull_between_tasks(pool: GatedPool) -> None:
    """Threads that are idle, or about to be, run the tasks that follow."""
    for number in range(300):
        pool.threads.submit(*(pool.quick(number),))
        assert take(pool.ended, 1) == [number]


@of(2)
def test_tasks_from_a_task(pool: GatedPool) -> None:
    """A task may submit others, and wait for them."""
    inner: queue.SimpleQueue[int] = queue.SimpleQueue()

    def outer() -> None:
        pool.threads.submit(*(functools.partial(inner.put, 1),))
        pool.ended.put(inner.get(timeout=SOON))

    for _ in range(5):
        pool.threads.submit(*(outer,))
        assert take(pool.ended, 1) == [1]


@of(64)
def test_quick_tasks_use_few_threads(pool: GatedPool) -> None:
    """A thousand that end at once need no sixty-four threads."""
    before = threading.active_count()
    for first in range(0, 1000, 10):
        pool.threads.submit(*[pool.quick(number) for number in range(first, first + 10)])
    assert sorted(take(pool.ended, 1000)) == list(range(1000))
    assert threading.active_count() - before < 16


@of(8)
def test_calls_one_after_another_run_in_one_thread(pool: GatedPool) -> None:
    """The thread that was idle last takes the next task, however many others are idle."""
    pool.threads.submit(*[pool.blocked(number) for number in range(8)])
    take(pool.started, 8)
    pool.gate.set()
    take(pool.ended, 8)

    def thread_of_a_task() -> int:
        while pool.threads._busy:
            time.sleep(0.001)
        pool.threads.submit(*(lambda: pool.ended.put(threading.get_ident()),))
        return pool.ended.get(timeout=SOON)

    assert len({thread_of_a_task() for _ in range(20)}) == 1


@of(2)
def test_an_idle_thread_keeps_nothing_alive(pool: GatedPool) -> None:
    """What a task held is freed when it has ended."""

    class Large:
        pass

    large = Large()
    freed = threading.Event()
    weakref.finalize(large, freed.set)
    pool.threads.submit(*(functools.partial(lambda _: None, large),))
    del large
    assert freed.wait(SOON)


# ── the end ─────────────────────────────────────────────────────────────────────────────────────


def test_close_counts_the_stuck() -> None:
    """It does not wait for them longer than it was told; later they end by themselves."""
    pool = GatedPool(4)
    pool.threads.submit(*[*map(pool.blocked, range(3)), pool.quick(9)])
    take(pool.started, 3)
    take(pool.ended, 1)
    assert pool.threads.close(0.05) == 3
    pool.gate.set()
    assert sorted(take(pool.ended, 3)) == [0, 1, 2]
    assert pool.threads.close(SOON) == 0


def test_what_was_submitted_before_the_end_is_done() -> None:
    """Tasks that wait as the threads are closed still run, also if every thread is stuck."""
    pool = GatedPool(1)
    pool.threads.submit(*(pool.blocked(0),))
    take(pool.started, 1)
    pool.threads.submit(*[pool.quick(1), pool.quick(2)])
    assert pool.threads.close(0.0) == 1
    assert take(pool.ended, 2) == [1, 2]
    pool.gate.set()
    assert take(pool.ended, 1) == [0]
    assert pool.threads.close(SOON) == 0


def test_what_is_submitted_after_the_end_is_done() -> None:
    """Whoever awaits it would wait for ever otherwise."""
    pool = GatedPool(2)
    assert pool.threads.close(SOON) == 0
    pool.threads.submit(*[pool.quick(1), pool.quick(2)])
    assert take(pool.ended, 2) == [1, 2]


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not counted: submit raises, close does not, and existing threads continue."""
    threads = DaemonThreadPool(2, lambda: set_intra_op_threads(1))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            threads.submit(*[lambda: None])
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    threads.submit(*[lambda: done.put(1)])
    assert done.get(timeout=30.0) == 1
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        gate = threading.Event()
        threads.submit(*[gate.wait, lambda: done.put(2)])  # type: ignore[list-item]
        gate.set()
        assert done.get(timeout=30.0) == 2
    assert threads.close(20.0) == 0


def test_no_thread_is_started_for_nothing() -> None:
    """Threads are started when they are needed, and end when they are told."""
    before = {*threading.enumerate()}  # idle ones of these may end at any time

    def started() -> set[threading.Thread]:
        return {*threading.enumerate()} - before

    pool = GatedPool(64)
    assert not started()
    pool.threads.submit(*(pool.quick(0),))
    take(pool.ended, 1)
    assert len(started()) == 1
    assert pool.threads.close(SOON) == 0
    assert not started()


# ── torch's own threads, and lone tasks ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [1, 3])
def test_torch_is_told_its_thread_count(count: int) -> None:
    """Each thread computes with as many of torch's as it was told."""
    counts: queue.SimpleQueue[int] = queue.SimpleQueue()
    threads = DaemonThreadPool(2, lambda: set_intra_op_threads(count))
    threads.submit(*(lambda: counts.put(torch.get_num_threads()),))
    assert counts.get(timeout=SOON) == count
    assert threads.close(SOON) == 0


def test_tune_tells_a_thread_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask torch each time would cost more than it saves."""
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)

    def work() -> None:
        for count in (2, 2, 3, 3, 2):
            set_intra_op_threads(count)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told == [2, 3, 2]


async def test_a_blocking_function_is_awaited() -> None:
    """It returns or raises as the function does; a StopIteration becomes a RuntimeError."""
    name = "aiorpc-test"
    assert await run_in_thread(lambda: threading.current_thread().name, name) == name
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 // 0, name)
    with pytest.raises(SystemExit):
        await run_in_thread(lambda: sys.exit(3), name)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await run_in_thread(lambda: next(iter(())), name)


async def test_a_cancelled_wait_lets_the_function_run() -> None:
    """A thread cannot be interrupted: it runs to its end, and its result is dropped."""
    gate, begun, ended = threading.Event(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def function() -> None:
        loop.call_soon_threadsafe(begun.set)
        assert gate.wait(SOON)
        ended.set()

    waiting = asyncio.create_task(run_in_thread(function, "aiorpc-test"))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not ended.is_set()
    gate.set()
    assert await asyncio.to_thread(ended.wait, SOON)


@pytest.mark.parametrize("ending", ["returns", "raises", "is cancelled"])
async def test_the_thread_keeps_nothing_of_a_function_that_was_awaited(
    monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Not even before the thread goes on: Python may end by then."""
    gate, halted = threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    schedule = loop.call_soon_threadsafe

    def halt(*args: Any, **kwargs: Any) -> None:
        schedule(*args, **kwargs)
        if threading.current_thread().name == "aiorpc-test":
            halted.set()
            assert gate.wait(SOON)

    class Large:
        def method(self) -> "Large":
            if ending == "raises":
                raise ValueError(Large())
            return self

    monkeypatch.setattr(loop, "call_soon_threadsafe", halt)
    waiting = asyncio.create_task(run_in_thread(Large().method, "aiorpc-test"))
    await asyncio.sleep(0)
    if ending == "is cancelled":
        waiting.cancel()
    with contextlib.suppress(ValueError, asyncio.CancelledError):
        await waiting
    del waiting
    assert await asyncio.to_thread(halted.wait, SOON)
    await asyncio.sleep(0)  # for the result of the cancelled wait
    gc.collect()
    left = [each for each in gc.get_objects() if type(each) is Large]
    gate.set()
    assert not left


# ── spare threads ───────────────────────────────────────────────────────────────────────────────


def test_cached_threads_do_not_wait_for_each_other() -> None:
    """Each task starts at once, whatever others do; an idle thread takes the next, and ends."""
    spare = ThreadCache("spare", idle_timeout=SOON)
    gate, names = threading.Event(), queue.SimpleQueue[threading.Thread]()

    def stuck() -> None:
        names.put(threading.current_thread())
        gate.wait(30.0)

    for _ in range(3):
        spare(stuck)
    first = {names.get(timeout=30.0) for _ in range(3)}
    assert len(first) == 3
    gate.set()
    while len(spare._idle) < 3:
        time.sleep(0.001)
    spare(stuck)
    assert names.get(timeout=30.0) in first
    spare._idle_timeout = 0.0
    while len(spare._idle) < 3:
        time.sleep(0.001)
    for _ in first:  # each wakes a thread, which ends
        spare(lambda: None)
    for thread in first:
        thread.join(SOON)
        assert not thread.is_alive()
    assert not spare._idle


def test_the_thread_that_was_idle_last_gets_the_next_task() -> None:
    """So few threads keep memory of their own."""
    spare = ThreadCache("spare", idle_timeout=SOON)
    gates, names = [threading.Event() for _ in range(3)], queue.SimpleQueue[str]()
    ran = queue.SimpleQueue[int]()

    def work(gate: threading.Event) -> None:
        names.put("begun")
        gate.wait(SOON)

    for gate in gates:
        spare(functools.partial(work, gate))
    for _ in gates:
        names.get(timeout=SOON)
    for count, gate in enumerate(gates, 1):  # they are idle one after another
        gate.set()
        while len(spare._idle) < count:
            time.sleep(0.001)
    for _ in range(5):
        spare(lambda: ran.put(threading.get_ident()))
        last = ran.get(timeout=SOON)
        while len(spare._idle) < len(gates):
            time.sleep(0.001)
        spare(lambda: ran.put(threading.get_ident()))
        assert ran.get(timeout=SOON) == last
        while len(spare._idle) < len(gates):
            time.sleep(0.001)
    spare._idle_timeout = 0.0
    for _ in gates:  # each wakes a thread, which ends
        spare(lambda: None)


def test_an_idle_spare_thread_keeps_nothing_alive() -> None:
    """Neither its first task nor a later one."""
    spare = ThreadCache("spare", idle_timeout=SOON)
    for _ in range(2):
        freed = threading.Event()
        task = functools.partial(print, end="")
        weakref.finalize(task, freed.set)
        spare(task)
        del task
        assert freed.wait(SOON)
    spare._idle_timeout = 0.0
    spare(lambda: None)


def test_a_spare_thread_that_ends_misses_no_task() -> None:
    """Tasks arrive just as idle threads time out."""
    spare = ThreadCache("spare", idle_timeout=0.001)
    done = queue.SimpleQueue[int]()
    for number in range(300):
        spare(functools.partial(done.put, number))
        time.sleep(0.0005 * (number % 5))
    assert sorted(done.get(timeout=30.0) for _ in range(300)) == [*range(300)]
    while any(thread.name == "spare" for thread in threading.enumerate()):
        time.sleep(0.001)


def test_a_fork_has_threads_of_its_own() -> None:
    """Those of its parent are not there, idle or not."""
    spare = ThreadCache("spare", idle_timeout=SOON)
    done = threading.Event()
    spare(done.set)
    assert done.wait(SOON)
    while not spare._idle:
        time.sleep(0.001)
    spare._lock.acquire()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, since 3.12
        child = os.fork()
    if not child:
        ran = threading.Event()
        spare(ran.set)
        os._exit(0 if ran.wait(SOON) else 1)
    spare._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    spare._idle_timeout = 0.0
    spare(lambda: None)
