"""From any thread into one event loop: in order, nothing lost, few wake-ups, no torch."""

import asyncio
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from aiorpc_torch._aio.entry_queue import BURST, Inbox


def on_threads(*functions: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


@pytest.fixture
async def wake_ups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every `call_soon_threadsafe` of the running loop."""
    loop, seen = asyncio.get_running_loop(), []
    original = loop.call_soon_threadsafe

    def counted(callback: Any, *args: Any, **kwargs: Any) -> asyncio.Handle:
        seen.append(callback)
        return original(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    return seen


async def test_items_are_taken_on_the_loops_thread() -> None:
    """Wherever they were pushed; and not by the push itself."""
    taken: list[tuple[int, threading.Thread]] = []
    inbox: Inbox[int] = Inbox(
        asyncio.get_running_loop(), lambda item: taken.append((item, threading.current_thread()))
    )
    inbox.push(1)
    join(on_threads(lambda: inbox.push(2)))
    assert taken == []
    await asyncio.sleep(0)
    assert taken == [(1, threading.current_thread()), (2, threading.current_thread())]


async def test_many_pushes_are_one_wake_up(wake_ups: list[Any]) -> None:
    """The first to lie there wakes the loop; the next, after it was emptied, wakes it again."""
    taken: list[int] = []
    inbox: Inbox[int] = Inbox(asyncio.get_running_loop(), taken.append)
    for start in (0, 100):
        join(on_threads(lambda start=start: [inbox.push(start + n) for n in range(100)]))
        await asyncio.sleep(0)
    assert taken == list(range(200))
    assert len(wake_ups) == 2


async def test_a_thousand_items_leave_room_for_others(wake_ups: list[Any]) -> None:
    """No more than BURST are taken in a turn: other callbacks of the loop run in between."""
    taken: list[int] = []
    seen: list[int] = []
    inbox: Inbox[int] = Inbox(asyncio.get_running_loop(), taken.append)
    total = 4 * BURST + 1
    for n in range(total):
        inbox.push(n)
    while len(taken) < total:
        await asyncio.sleep(0)
        seen.append(len(taken))
    assert seen == [BURST, 2 * BURST, 3 * BURST, 4 * BURST, total]
    assert taken == list(range(total))
    assert len(wake_ups) == 5


async def test_what_is_pushed_while_it_is_emptied_comes_next() -> None:
    """A `take` that pushes starves nobody: what it pushed is for the next turn."""
    taken: list[int] = []

    def take(item: int) -> None:
        taken.append(item)
        if item < 5:
            inbox.push(item + 1)

    inbox: Inbox[int] = Inbox(asyncio.get_running_loop(), take)
    inbox.push(0)
    lengths = []
    for _ in range(7):
        await asyncio.sleep(0)
        lengths.append(len(taken))
    assert lengths == [1, 2, 3, 4, 5, 6, 6]


async def test_nothing_is_lost_while_threads_push() -> None:
    """Every item arrives once, and those of one thread in the order in which it pushed them."""
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

    inbox: Inbox[tuple[int, int]] = Inbox(asyncio.get_running_loop(), take)
    start = threading.Barrier(count)

    def push(thread: int) -> None:
        start.wait()
        for n in range(each):
            inbox.push((thread, n))

    threads = on_threads(*(lambda thread=thread: push(thread) for thread in range(count)))
    async with asyncio.timeout(30.0):
        await done.wait()
    join(threads)
    await asyncio.sleep(0)
    assert dict(taken) == {thread: list(range(each)) for thread in range(count)}


async def test_each_single_push_is_noticed() -> None:
    """One at a time, each waited for: the race of the last look and the next push, many times."""
    taken = asyncio.Event()
    go, stop = threading.Semaphore(0), 2_000
    inbox: Inbox[int] = Inbox(asyncio.get_running_loop(), lambda _: taken.set())

    def push() -> None:
        for n in range(stop):
            go.acquire()
            inbox.push(n)

    threads = on_threads(push)
    async with asyncio.timeout(30.0):
        for _ in range(stop):
            taken.clear()
            go.release()
            await taken.wait()
    join(threads)


class Item:
    """Something to be watched until it is gone."""


def test_after_the_loop_is_closed_items_are_dropped() -> None:
    """On any thread, in silence, and without keeping them: each push, not the first alone."""
    loop = asyncio.new_event_loop()
    taken: list[Item] = []
    inbox: Inbox[Item] = Inbox(loop, taken.append)
    loop.close()
    watched: weakref.WeakSet[Item] = weakref.WeakSet()

    def push() -> None:
        for _ in range(3):
            item = Item()
            watched.add(item)
            inbox.push(item)

    push()
    join(on_threads(push))
    gc.collect()
    assert taken == []
    assert len(watched) == 0
    assert "0 waiting" in repr(inbox)


def test_a_loop_that_is_closed_with_items_in_the_inbox() -> None:
    """What comes after does not heap up on what the loop never took."""
    loop = asyncio.new_event_loop()
    taken: list[Item] = []
    inbox: Inbox[Item] = Inbox(loop, taken.append)
    inbox.push(Item())
    loop.close()
    watched: weakref.WeakSet[Item] = weakref.WeakSet()
    for _ in range(3):
        item = Item()
        watched.add(item)
        inbox.push(item)
    del item
    gc.collect()
    assert taken == []
    assert len(watched) == 0


def test_a_closed_loop_is_not_kept_alive() -> None:
    """An inbox outlives its loop without holding it, and takes pushes all the same."""
    loop = asyncio.new_event_loop()
    inbox: Inbox[int] = Inbox(loop, lambda _: None)
    inbox.push(1)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    inbox.push(2)


async def test_it_shows_its_state() -> None:
    """How many wait, and whether the loop has been woken for them."""
    inbox: Inbox[int] = Inbox(asyncio.get_running_loop(), lambda _: None)
    assert repr(inbox) == "<Inbox 0 waiting>"
    inbox.push(1)
    assert repr(inbox) == "<Inbox 1 waiting, armed>"
    await asyncio.sleep(0)
    assert repr(inbox) == "<Inbox 0 waiting>"


async def test_an_item_that_raises_forgets_no_other() -> None:
    """The loop reports it, and what came with it is still handed over."""
    loop, taken, reported = asyncio.get_running_loop(), [], asyncio.Event()
    loop.set_exception_handler(lambda _, context: reported.set())

    def take(item: int) -> None:
        if item == 1:
            raise ValueError(item)
        taken.append(item)

    inbox = Inbox(loop, take)
    for item in range(4):
        inbox.push(item)
    await asyncio.wait_for(reported.wait(), 5)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert taken == [0, 2, 3]
