"""Threads for plain functions: order, nothing held back, nothing lost, none left behind."""

import asyncio
import functools
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from aiorpc_torch._aio.threads import Spare, Threads, daemon, run_blocking
from aiorpc_torch._torch.thread_state import tune

SOON = 10.0  # seconds after which something will never happen


class Room:
    """Some threads and a gate at which their tasks wait."""

    def __init__(self, size: int) -> None:
        self.threads = Threads(size, lambda: tune(torch.get_num_threads()))
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
def room(request) -> Iterator[Room]:
    room = Room(request.param)
    yield room
    room.gate.set()
    assert room.threads.close(SOON) == 0


def of(size: int):
    return pytest.mark.parametrize("room", [size], indirect=True)


def take(ended: "queue.SimpleQueue[int]", count: int) -> list[int]:
    return [ended.get(timeout=SOON) for _ in range(count)]


@of(1)
def test_tasks_start_in_order(room: Room) -> None:
    """One thread takes one after the other, whether they come together or one by one."""
    room.threads.submit([room.quick(number) for number in range(50)])
    for number in range(50, 100):
        room.threads.submit((room.quick(number),))
    assert take(room.ended, 100) == list(range(100))


@of(4)
def test_the_only_free_thread_keeps_the_order(room: Room) -> None:
    """However many others there are that are blocked."""
    room.threads.submit([room.blocked(-number) for number in range(3)])
    take(room.started, 3)
    room.threads.submit([room.quick(number) for number in range(100)])
    assert take(room.ended, 100) == list(range(100))


@of(2)
@pytest.mark.parametrize("pause", [0.0, 0.005])
def test_a_blocked_task_holds_back_none(room: Room, pause: float) -> None:
    """Whether the next one comes at once, as the blocked one has just started, or later."""
    room.threads.submit((room.blocked(0),))
    assert take(room.started, 1) == [0]
    time.sleep(pause)
    room.threads.submit((room.quick(1),))
    assert take(room.ended, 1) == [1]


@of(4)
def test_a_task_that_comes_with_a_blocked_one(room: Room) -> None:
    """Submitted together, and taken by the same thread or not."""
    room.threads.submit([room.blocked(0), room.quick(1), room.blocked(2), room.quick(3)])
    assert sorted(take(room.ended, 2)) == [1, 3]


@of(8)
def test_all_threads_are_used_when_all_block(room: Room) -> None:
    """As many run at once as there may be, and not one more; the rest waits."""
    room.threads.submit([room.blocked(number) for number in range(12)])
    assert sorted(take(room.started, 8)) == list(range(8))
    assert repr(room.threads) == "<Threads 8 busy of 8, 4 tasks waiting>"
    assert room.started.empty()
    room.gate.set()
    assert sorted(take(room.ended, 12)) == list(range(12))


@of(8)
def test_one_by_one_all_threads_are_used_too(room: Room) -> None:
    """Each task that blocks is found to block, however quickly the next one follows."""
    for number in range(8):
        room.threads.submit((room.blocked(number),))
        assert take(room.started, 1) == [number]


@of(8)
def test_tasks_that_wait_for_each_other(room: Room) -> None:
    """Eight that meet at a barrier get eight threads."""
    barrier = threading.Barrier(8)

    def meet() -> None:
        barrier.wait(SOON)
        room.ended.put(0)

    for _ in range(3):
        room.threads.submit([meet] * 8)
        take(room.ended, 8)


@of(4)
def test_nothing_is_lost_in_a_storm(room: Room) -> None:
    """Several threads submit at once, in lots of any size."""

    def submit(first: int, size: int) -> None:
        for start in range(first, first + 1000, size):
            end = min(start + size, first + 1000)
            room.threads.submit([room.quick(number) for number in range(start, end)])

    storm = [
        threading.Thread(target=submit, args=(1000 * each, size))
        for each, size in enumerate((1, 2, 7, 100))
    ]
    for thread in storm:
        thread.start()
    ended = take(room.ended, 4000)
    for thread in storm:
        thread.join()
    assert sorted(ended) == list(range(4000))
    assert room.ended.empty()


@of(4)
def test_a_lull_between_tasks(room: Room) -> None:
    """Threads that have become idle, or are about to, come back for what follows."""
    for number in range(300):
        room.threads.submit((room.quick(number),))
        assert take(room.ended, 1) == [number]


@of(2)
def test_tasks_from_a_task(room: Room) -> None:
    """Whoever is at work may ask for more work, and wait for it."""
    inner: queue.SimpleQueue[int] = queue.SimpleQueue()

    def outer() -> None:
        room.threads.submit((functools.partial(inner.put, 1),))
        room.ended.put(inner.get(timeout=SOON))

    for _ in range(5):
        room.threads.submit((outer,))
        assert take(room.ended, 1) == [1]


@of(64)
def test_quick_tasks_use_few_threads(room: Room) -> None:
    """A thousand that end at once need no sixty-four threads."""
    before = threading.active_count()
    for first in range(0, 1000, 10):
        room.threads.submit([room.quick(number) for number in range(first, first + 10)])
    assert sorted(take(room.ended, 1000)) == list(range(1000))
    assert threading.active_count() - before < 16


@of(2)
def test_an_idle_thread_keeps_nothing_alive(room: Room) -> None:
    """What a task held is freed when it has ended."""

    class Large:
        pass

    large = Large()
    freed = threading.Event()
    weakref.finalize(large, freed.set)
    room.threads.submit((functools.partial(lambda _: None, large),))
    del large
    assert freed.wait(SOON)


# ── the end ─────────────────────────────────────────────────────────────────────────────────────


def test_close_counts_the_stuck() -> None:
    """It does not wait for them longer than it was told; later they end by themselves."""
    room = Room(4)
    room.threads.submit([*map(room.blocked, range(3)), room.quick(9)])
    take(room.started, 3)
    take(room.ended, 1)
    assert room.threads.close(0.05) == 3
    room.gate.set()
    assert sorted(take(room.ended, 3)) == [0, 1, 2]
    assert room.threads.close(SOON) == 0


def test_what_was_submitted_before_the_end_is_done() -> None:
    """Tasks that wait as the threads are closed still run."""
    room = Room(1)
    room.threads.submit((room.blocked(0),))
    take(room.started, 1)
    room.threads.submit([room.quick(1), room.quick(2)])
    assert room.threads.close(0.0) == 1
    room.gate.set()
    assert take(room.ended, 3) == [0, 1, 2]
    assert room.threads.close(SOON) == 0


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no books: submitting raises, closing does not, and threads that are there go on."""
    threads = Threads(2, lambda: tune(1))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            threads.submit([lambda: None])
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    threads.submit([lambda: done.put(1)])
    assert done.get(timeout=20.0) == 1
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        gate = threading.Event()
        threads.submit([gate.wait, lambda: done.put(2)])  # type: ignore[list-item]
        gate.set()
        assert done.get(timeout=20.0) == 2
    assert threads.close(20.0) == 0


def test_no_thread_is_started_for_nothing() -> None:
    """Threads are started when they are needed, and end when they are told."""
    before = threading.active_count()
    room = Room(64)
    assert threading.active_count() == before
    room.threads.submit((room.quick(0),))
    take(room.ended, 1)
    assert threading.active_count() == before + 1
    assert room.threads.close(SOON) == 0
    assert threading.active_count() == before


# ── torch's own threads, and lone tasks ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [1, 3])
def test_torch_is_told_its_thread_count(count: int) -> None:
    """Each thread computes with as many of torch's as it was told."""
    counts: queue.SimpleQueue[int] = queue.SimpleQueue()
    threads = Threads(2, lambda: tune(count))
    threads.submit((lambda: counts.put(torch.get_num_threads()),))
    assert counts.get(timeout=SOON) == count
    assert threads.close(SOON) == 0


def test_tune_tells_a_thread_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask torch each time would cost more than it saves."""
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)

    def work() -> None:
        for count in (2, 2, 3, 3, 2):
            tune(count)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told == [2, 3, 2]


async def test_a_blocking_function_is_awaited() -> None:
    """Its value, or what it raises; a StopIteration cannot be, and is told as an error."""
    start = daemon("aiorpc-test")
    assert await run_blocking(start, lambda: 7) == 7
    assert await run_blocking(start, lambda: threading.current_thread().name) == "aiorpc-test"
    with pytest.raises(ZeroDivisionError):
        await run_blocking(start, lambda: 1 // 0)
    with pytest.raises(SystemExit):
        await run_blocking(start, lambda: sys.exit(3))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await run_blocking(start, lambda: next(iter(())))


async def test_a_cancelled_wait_lets_the_function_run() -> None:
    """A thread cannot be interrupted: it runs to its end, and its result is dropped."""
    gate, begun, ended = threading.Event(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def function() -> None:
        loop.call_soon_threadsafe(begun.set)
        assert gate.wait(SOON)
        ended.set()

    waiting = asyncio.create_task(run_blocking(daemon("aiorpc-test"), function))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not ended.is_set()
    gate.set()
    assert await asyncio.to_thread(ended.wait, SOON)


# ── spare threads ───────────────────────────────────────────────────────────────────────────────


def test_spare_threads_wait_for_nobody() -> None:
    """Each task starts at once, whatever others do; an idle thread takes the next, and ends."""
    spare = Spare("spare", patience=0.2)
    gate, names = threading.Event(), queue.SimpleQueue[threading.Thread]()

    def stuck() -> None:
        names.put(threading.current_thread())
        gate.wait(10.0)

    for _ in range(3):
        spare(stuck)
    first = {names.get(timeout=5.0) for _ in range(3)}
    assert len(first) == 3
    gate.set()
    while len(spare._idle) < 3:
        time.sleep(0.001)
    spare(stuck)
    assert names.get(timeout=5.0) in first
    for thread in first:
        thread.join(5.0)
        assert not thread.is_alive()
    assert repr(spare) == "<Spare spare, 0 idle>"


def test_a_spare_thread_that_ends_misses_no_task() -> None:
    """Tasks come just as threads give up waiting."""
    spare = Spare("spare", patience=0.001)
    done = queue.SimpleQueue[int]()
    for number in range(300):
        spare(functools.partial(done.put, number))
        time.sleep(0.0005 * (number % 5))
    assert sorted(done.get(timeout=5.0) for _ in range(300)) == [*range(300)]
    while any(thread.name == "spare" for thread in threading.enumerate()):
        time.sleep(0.001)
