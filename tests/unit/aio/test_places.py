"""Lines of tasks and threads, what tasks wait for, and who holds a lock."""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from aiorpc_torch._aio.places import (
    MOST_LINES,
    awaited_lock,
    chains_of,
    holds_lock,
    is_at_lock,
    lines_of,
    lines_of_loop,
)


async def waits(event: asyncio.Event) -> None:
    await event.wait()


async def items(event: asyncio.Event) -> AsyncIterator[int]:
    await event.wait()
    yield 1


async def iterates(event: asyncio.Event) -> None:
    async for _ in items(event):
        pass


async def gathers(event: asyncio.Event) -> None:
    await asyncio.gather(waits(event), waits(event))


async def in_a_group(event: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(waits(event))
        tasks.create_task(waits(event))


async def waits_for_tasks(event: asyncio.Event) -> None:
    tasks = [asyncio.create_task(waits(event)) for _ in range(2)]
    try:
        await asyncio.wait(tasks)
    finally:
        await ended(*tasks)


async def waits_for_a_task(event: asyncio.Event) -> None:
    await asyncio.create_task(waits(event))


async def with_a_limit(event: asyncio.Event) -> None:
    await asyncio.wait_for(waits(event), 1000)


async def started(coroutine: Any) -> "asyncio.Task[Any]":
    task = asyncio.create_task(coroutine)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def ended(*tasks: "asyncio.Task[Any]") -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("function", "tasks"),
    [
        *((waits, 0), (iterates, 0), (gathers, 2), (in_a_group, 2)),
        *((waits_for_tasks, 2), (waits_for_a_task, 1), (with_a_limit, 1)),
    ],
)
async def test_tasks_that_a_task_waits_for(function: Any, tasks: int) -> None:
    """Its own lines come first; asyncio's wait_for of Python 3.12 and later makes no task."""
    event = asyncio.Event()
    task = await started(function(event))
    first, *others = chains_of(task)
    names = [each.function for each in lines_of(first.frames)[0]]
    assert names[0] == function.__qualname__
    is_inline = function is with_a_limit and sys.version_info >= (3, 12)
    assert len(others) == (0 if is_inline else tasks)
    for each in others or [first]:
        lines, inside = lines_of(each.frames)
        assert lines[-1].function in ("waits", "items")
        assert inside == "Event.wait"
    await ended(task)
    assert chains_of(task) == []


async def recursive(depth: int, event: asyncio.Event) -> None:
    await (recursive(depth - 1, event) if depth else event.wait())


async def test_many_lines() -> None:
    """The first and the last ones are kept."""
    task = await started(recursive(20, asyncio.Event()))
    lines, _ = lines_of(chains_of(task)[0].frames)
    assert len(lines) == MOST_LINES
    await ended(task)


# ── locks ───────────────────────────────────────────────────────────────────────────────────────


async def holds(lock: Any, event: asyncio.Event) -> None:
    async with lock:
        await waits(event)


async def holds_deeper(lock: Any, event: asyncio.Event) -> None:
    await holds(lock, event)


async def has_held(lock: Any, event: asyncio.Event) -> None:
    async with lock:
        pass
    await waits(event)


async def knows(lock: Any, event: asyncio.Event) -> None:
    exit_of_lock = lock  # a variable
    await waits(event)
    del exit_of_lock


async def acquires(lock: Any, event: asyncio.Event) -> None:
    await lock.acquire()
    await waits(event)


@pytest.mark.promise("where.deadlock")
@pytest.mark.parametrize("kind", [asyncio.Lock, asyncio.Semaphore])
@pytest.mark.parametrize(
    ("function", "expected"),
    [(holds, True), (holds_deeper, True), (has_held, False), (knows, False), (acquires, False)],
)
async def test_who_holds_a_lock(kind: Any, function: Any, expected: bool) -> None:
    """A task inside of `async with`. One that waits for the lock in the same way does not."""
    lock, event = kind(), asyncio.Event()
    task = await started(function(lock, event))
    (chain,) = chains_of(task)
    assert holds_lock(chain, lock) is expected
    assert not holds_lock(chain, kind())
    assert awaited_lock(chain) is None
    if lock.locked():
        other = await started(holds(lock, event))
        (waiting,) = chains_of(other)
        assert awaited_lock(waiting) is lock
        assert not holds_lock(waiting, lock)
        await ended(other)
    await ended(task)


@contextmanager
def innermost(function: Any, *args: Any) -> Iterator[FrameType]:
    """Run a function in a thread; give the frame in which it stands, once it does."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    assert thread.ident is not None
    last = None
    while (frame := sys._current_frames()[thread.ident]) is not last or not _is_in(frame, function):
        last = frame
        time.sleep(0.05)
    yield frame


def _is_in(frame: FrameType | None, function: Any) -> bool:
    """Return whether a thread has come so far; a busy machine may let it stand before."""
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_lasti > 0


def with_lock(lock: Any) -> None:
    with lock:
        pass


def acquire(lock: Any) -> None:
    lock.acquire()


def waits_for_an_event(lock: Any) -> None:
    threading.Event().wait()


def sleeps_inside(lock: Any) -> None:
    with threading.Lock():
        time.sleep(100)


@pytest.mark.parametrize(
    ("function", "expected"),
    [(with_lock, True), (acquire, True), (waits_for_an_event, False), (sleeps_inside, False)],
)
@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock])
def test_a_thread_at_a_lock(kind: Any, function: Any, expected: bool) -> None:
    """An event of `threading` waits for a lock too, which is not the program's."""
    lock = kind()
    with lock, innermost(function, lock) as frame:
        assert is_at_lock(frame) is expected


async def test_a_loop_that_waits_for_events_has_no_lines() -> None:
    """One that is blocked has those of the task, not those of the program that runs the loop."""
    thread = threading.get_ident()

    async def blocks() -> list[str]:
        return [each.function for each in await asyncio.to_thread(lines_of_loop, thread)]

    def stands() -> list[Any]:
        asked = []
        other = threading.Thread(target=lambda: asked.append(lines_of_loop(thread)))
        other.start()
        other.join()
        return asked[0]

    assert await blocks() == []
    assert [each.function.rpartition(".")[2] for each in stands()][-1] == "stands"
