"""`EntryQueue`: items in order, none lost, few wake-ups of the loop."""

import asyncio
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from aiorpc_torch._aio.entry_queue import MAX_PER_ITERATION, EntryQueue


def on_threads(*functions: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


@pytest.fixture
async def wake_ups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record every `call_soon_threadsafe` of the running loop."""
    loop, seen = asyncio.get_running_loop(), []
    original = loop.call_soon_threadsafe

    def counted(callback: Any, *args: Any, **kwargs: Any) -> asyncio.Handle:
        seen.append(callback)
        return original(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    return seen


async def test_items_are_handled_on_the_loops_thread() -> None:
    """Items are handled on the loop's thread, whichever put them, and never inside `put`."""
    taken: list[tuple[int, threading.Thread]] = []
    entries: EntryQueue[int] = EntryQueue(
        asyncio.get_running_loop(), lambda item: taken.append((item, threading.current_thread()))
    )
    entries.put(1)
    join(on_threads(lambda: entries.put(2)))
    assert taken == []
    await asyncio.sleep(0)
    assert taken == [(1, threading.current_thread()), (2, threading.current_thread())]


@pytest.mark.promise("calls.futures_burst")
async def test_many_puts_are_one_wake_up(wake_ups: list[Any]) -> None:
    """The first item wakes the loop; after a drain, the next one wakes it again."""
    taken: list[int] = []
    entries: EntryQueue[int] = EntryQueue(asyncio.get_running_loop(), taken.append)
    for start in (0, 100):
        join(on_threads(lambda start=start: [entries.put(start + n) for n in range(100)]))
        await asyncio.sleep(0)
    assert taken == list(range(200))
    assert len(wake_ups) == 2


async def test_a_thousand_items_do_not_starve_other_callbacks(wake_ups: list[Any]) -> None:
    """At most MAX_PER_ITERATION are handled in an iteration: other callbacks run in between."""
    taken: list[int] = []
    seen: list[int] = []
    entries: EntryQueue[int] = EntryQueue(asyncio.get_running_loop(), taken.append)
    total = 4 * MAX_PER_ITERATION + 1
    for n in range(total):
        entries.put(n)
    while len(taken) < total:
        await asyncio.sleep(0)
        seen.append(len(taken))
    assert seen == [
        MAX_PER_ITERATION,
        2 * MAX_PER_ITERATION,
        3 * MAX_PER_ITERATION,
        4 * MAX_PER_ITERATION,
        total,
    ]
    assert taken == list(range(total))
    assert len(wake_ups) == 1


async def test_items_put_during_a_drain_come_next() -> None:
    """A handler that puts items starves no callback: they wait for the next iteration."""
    taken: list[int] = []

    def take(item: int) -> None:
        taken.append(item)
        if item < 5:
            entries.put(item + 1)

    entries: EntryQueue[int] = EntryQueue(asyncio.get_running_loop(), take)
    entries.put(0)
    lengths = []
    for _ in range(7):
        await asyncio.sleep(0)
        lengths.append(len(taken))
    assert lengths == [1, 2, 3, 4, 5, 6, 6]


async def test_nothing_is_lost_while_threads_put() -> None:
    """Every item arrives once, those of one thread in the order of its puts."""
    each, count = 5_000, 6
    taken: defaultdict[int, list[int]] = defaultdict(list)
    done = asyncio.Event()
    total = 0

    def take(item: tuple[int, int]) -> None:
        nonlocal total
        taken[item[0]].append(item[1])
        total += 1
        if total == each * count:
            done.set()

    entries: EntryQueue[tuple[int, int]] = EntryQueue(asyncio.get_running_loop(), take)
    start = threading.Barrier(count)

    def push(thread: int) -> None:
        start.wait()
        for n in range(each):
            entries.put((thread, n))

    threads = on_threads(*(lambda thread=thread: push(thread) for thread in range(count)))
    async with asyncio.timeout(30.0):
        await done.wait()
    join(threads)
    await asyncio.sleep(0)
    assert dict(taken) == {thread: list(range(each)) for thread in range(count)}


async def test_each_single_put_is_noticed() -> None:
    """Put one item at a time and wait for it: many races of a drain's end and the next put."""
    taken = asyncio.Event()
    go, stop = threading.Semaphore(0), 2_000
    entries: EntryQueue[int] = EntryQueue(asyncio.get_running_loop(), lambda _: taken.set())

    def push() -> None:
        for n in range(stop):
            go.acquire()
            entries.put(n)

    threads = on_threads(push)
    for _ in range(stop):
        taken.clear()
        go.release()
        async with asyncio.timeout(30.0):  # for each: a busy machine changes threads slowly
            await taken.wait()
    join(threads)


class Item:
    """Something to be watched until it is gone."""


def test_after_the_loop_is_closed_items_are_dropped() -> None:
    """Every put drops its item silently, on any thread, and keeps no reference."""
    loop = asyncio.new_event_loop()
    taken: list[Item] = []
    entries: EntryQueue[Item] = EntryQueue(loop, taken.append)
    loop.close()
    watched: weakref.WeakSet[Item] = weakref.WeakSet()

    def push() -> None:
        for _ in range(3):
            item = Item()
            watched.add(item)
            entries.put(item)

    push()
    join(on_threads(push))
    gc.collect()
    assert taken == []
    assert len(watched) == 0
    assert not entries._items


def test_a_loop_that_is_closed_with_items_in_the_queue() -> None:
    """Later items are not collected behind those that the loop never handled."""
    loop = asyncio.new_event_loop()
    taken: list[Item] = []
    entries: EntryQueue[Item] = EntryQueue(loop, taken.append)
    entries.put(Item())
    loop.close()
    watched: weakref.WeakSet[Item] = weakref.WeakSet()
    for _ in range(3):
        item = Item()
        watched.add(item)
        entries.put(item)
    del item
    gc.collect()
    assert taken == []
    assert len(watched) == 0


def test_a_closed_loop_is_not_kept_alive() -> None:
    """A queue outlives its loop without a reference to it, and still accepts items."""
    loop = asyncio.new_event_loop()
    entries: EntryQueue[int] = EntryQueue(loop, lambda _: None)
    entries.put(1)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    entries.put(2)


async def test_an_item_that_raises_forgets_no_other() -> None:
    """The loop reports the exception; the other items are still handled."""
    loop, taken, reported = asyncio.get_running_loop(), [], asyncio.Event()
    loop.set_exception_handler(lambda _, context: reported.set())

    def take(item: int) -> None:
        if item == 1:
            raise ValueError(item)
        taken.append(item)

    entries = EntryQueue(loop, take)
    for item in range(4):
        entries.put(item)
    await asyncio.wait_for(reported.wait(), 5)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert taken == [0, 2, 3]
