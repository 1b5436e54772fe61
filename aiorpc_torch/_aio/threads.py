"""Daemon threads for plain `def` methods and for calls that block.

The threads of `concurrent.futures` and of anyio are joined when the interpreter exits: one method
that never returns would keep the process alive. Also, anyio's capacity limiter knows neither the
order of arrival nor how long a thread is busy.
"""

import asyncio
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .fork import run_in_method
from .loops import call_soon

T = TypeVar("T")

Task = Callable[[], None]
Inbox = queue.SimpleQueue[Any]
"""The queue of one thread of a pool: steps, and None for its end."""

STALL = 0.001  # seconds that a task waits for the busy threads before the pool adds a thread


class DaemonThreadPool:
    """At most `size` daemon threads, started on demand. Tasks start in the order of `submit`.

    One thread runs task after task, which costs no switch between threads. A second one watches:
    it adds a thread for tasks that wait for over `STALL`, or one for each if no task has started.
    The thread that was idle last is woken first: each thread that allocates keeps some memory.
    """

    def __init__(self, size: int, initializer: Task) -> None:
        self._size = size
        self._initializer = initializer  # runs once in each thread
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._threads: dict[threading.Thread, Inbox] = {}
        self._idle: list[Inbox] = []  # of the threads that wait for a step
        self._busy = 0
        self._is_watched = self._is_closed = False
        self._last_start = 0.0

    def submit(self, *tasks: Task) -> None:
        """Run tasks, which must not raise, each in one of the threads. Callable from any thread.

        After `close` they run one after another in a new thread: whoever awaits a task, a batch of
        a world that has ended, say, would wait for ever if it was dropped.

        Raises:
            RuntimeError: if the pool has no thread, and the system cannot start one.
        """
        with self._lock:
            self._tasks.extend(tasks)
            if self._is_closed:
                self._run_rest()
                return
            # Busy threads whose last task started long ago may not be free soon.
            is_stalled = not self._busy or time.monotonic() - self._last_start > STALL
            woken = is_stalled and self._wake(self._run_tasks)
            if not self._is_watched and len(self._tasks) > woken:
                self._is_watched = self._wake(self._watch)

    def close(self, timeout: float) -> int:
        """End the threads; return how many still run a task after `timeout` seconds."""
        with self._lock:
            self._is_closed = True
            self._size = 0  # no thread starts from now on
            self._idle.clear()
            for inbox in self._threads.values():
                inbox.put(None)
        join_all(self._threads, timeout)
        with self._lock:
            self._run_rest()  # all threads are stuck
        return sum(thread.is_alive() for thread in self._threads)

    def _run_rest(self) -> None:
        """Run the tasks that wait in a new thread. Called with the lock held."""
        tasks, self._tasks = self._tasks, deque()

        def run() -> None:
            self._initializer()
            while tasks:
                tasks.popleft()()

        if tasks:
            threading.Thread(target=run, name="aiorpc-def-late", daemon=True).start()

    def _wake(self, step: Callable[[Inbox], None]) -> bool:
        """Let an idle or a new thread run `step`, if the pool may. Called with the lock held."""
        if self._idle:
            inbox = self._idle.pop()
        elif len(self._threads) < self._size:
            inbox = queue.SimpleQueue()
            name = f"aiorpc-def-{len(self._threads)}"
            thread = threading.Thread(target=self._run, args=(inbox,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more: the other threads run the tasks
                if self._threads:
                    return False
                self._tasks.clear()
                raise
            self._threads[thread] = inbox
        else:
            return False
        self._busy += step == self._run_tasks
        inbox.put(step)
        return True

    def _run(self, inbox: Inbox) -> None:
        self._initializer()
        while (step := inbox.get()) is not None:
            step(inbox)

    def _run_tasks(self, inbox: Inbox) -> None:
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                with self._lock:
                    if self._tasks:
                        continue
                    self._busy -= 1
                    self._idle.append(inbox)
                    return
            self._last_start = time.monotonic()
            task()
            del task  # an idle thread must not keep its last arguments alive

    def _watch(self, inbox: Inbox) -> None:
        """Add threads while tasks wait too long, then run tasks."""
        while True:
            seen = self._last_start
            time.sleep(STALL)
            with self._lock:
                has_stalled = seen == self._last_start
                more = len(self._tasks) if has_stalled else min(1, len(self._tasks))
                if not more or not all(self._wake(self._run_tasks) for _ in range(more)):
                    self._is_watched = False  # no task waits, or this is the last thread
                    self._busy += 1
                    break
        self._run_tasks(inbox)


def join_all(threads: Iterable[threading.Thread], timeout: float) -> None:
    """Wait for these threads to end, for at most `timeout` seconds in all."""
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


async def run_in_thread(
    function: Callable[[], T], name: str, start: Callable[[Task], None] | None = None
) -> T:
    """Await a blocking function in a daemon thread. A cancelled one runs on.

    When this returns, the thread holds neither the function nor its result: a thread that frees a
    tensor while Python ends aborts the process. (torch 2.15, Python 3.11)
    `start` gives the function a thread of a pool instead of a new one.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    outcomes: list[tuple[T | None, BaseException | None]] = []

    def complete() -> None:
        if done.done():  # cancelled
            outcomes.clear()
        else:
            done.set_result(None)

    def work() -> None:
        nonlocal function
        try:
            outcomes.append((run_in_method(function), None))
        except BaseException as exc:
            outcomes.append((None, exc))
        del function
        call_soon(loop, complete)

    if start is not None:
        start(work)
    else:
        threading.Thread(target=work, name=name, daemon=True).start()
    await done
    result, failure = outcomes.pop()
    if failure is None:
        return result  # type: ignore[return-value]
    try:
        raise failure
    finally:
        del failure  # its traceback refers to this frame


class ThreadCache:
    """Daemon threads for tasks that may block for ever: one for each task, without a limit.

    An idle thread waits `idle_timeout` seconds for the next task. The one that was idle last gets
    it: each thread that allocates keeps memory of its own. With a new thread for each
    backward a small step of training took longer. (`python -m benchmarks.autograd`)
    """

    def __init__(self, name: str, idle_timeout: float = 0.2) -> None:
        self._name = name
        self._idle_timeout = idle_timeout
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._idle: list[queue.SimpleQueue[Task]] = []  # of the threads that wait for a task
        self._lock = threading.Lock()

    def __call__(self, task: Task) -> None:
        """Run a task, which must not raise, at once. Callable from any thread."""
        if self._process != os.getpid():  # a fork has no threads, and perhaps a lock that is held
            self._begin()
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None:
            idle.put(task)
        else:
            # In a list, since the thread keeps its arguments.
            threading.Thread(target=self._run, args=([task],), name=self._name, daemon=True).start()

    def _run(self, first: list[Task]) -> None:
        task = first.pop()
        tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        while True:
            task()
            del task  # an idle thread must not keep its last arguments alive
            with self._lock:
                self._idle.append(tasks)
            try:
                task = tasks.get(timeout=self._idle_timeout)
            except queue.Empty:
                with self._lock:
                    if tasks in self._idle:
                        self._idle.remove(tasks)
                        return
                task = tasks.get()  # it is put at this moment


memory_threads = ThreadCache("aiorpc-memory")
"""Threads that copy, pack and unpack large values."""
