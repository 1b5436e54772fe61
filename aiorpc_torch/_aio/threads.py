"""Daemon threads for plain `def` methods and for calls that block.

The threads of `concurrent.futures` and of anyio are joined when the interpreter exits: one method
that never returns would keep the process alive.
"""

import asyncio
import contextlib
import enum
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from .loops import call_soon

T = TypeVar("T")

Task = Callable[[], None]

STALL = 0.001  # seconds that a task waits for the busy threads before the pool adds a thread


class _Wake(enum.Enum):
    """The reason for which an idle thread is woken."""

    WORK = enum.auto()
    WATCH = enum.auto()
    END = enum.auto()


class DaemonThreadPool:
    """At most `size` daemon threads, started on demand. Tasks start in the order of `submit`.

    One thread runs task after task, which costs no switch between threads. A second one watches:
    it adds a thread for tasks that wait for over `STALL`, or one for each if no task has started.
    """

    def __init__(self, size: int, initializer: Task) -> None:
        self._size = size
        self._initializer = initializer  # runs once in each thread
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._wakes: queue.SimpleQueue[_Wake] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._busy = 0
        self._is_watched = False
        self._last_start = 0.0

    def __repr__(self) -> str:
        waiting = len(self._tasks)
        return f"<DaemonThreadPool {self._busy} busy of {self._size}, {waiting} tasks waiting>"

    def submit(self, tasks: Iterable[Task]) -> None:
        """Run tasks, which must not raise, each in one of the threads. Callable from any thread.

        Raises:
            RuntimeError: if the pool has no thread, and the system cannot start one.
        """
        with self._lock:
            self._tasks.extend(tasks)
            # Busy threads whose last task started long ago may not be free soon.
            is_stalled = not self._busy or time.monotonic() - self._last_start > STALL
            woken = is_stalled and self._wake(_Wake.WORK)
            if not self._is_watched and len(self._tasks) > woken:
                self._is_watched = self._wake(_Wake.WATCH)

    def close(self, timeout: float) -> int:
        """End the threads; return how many still run a task after `timeout` seconds."""
        with self._lock:
            self._size = 0  # no thread starts from now on
            for _ in self._threads:
                self._wakes.put(_Wake.END)
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _wake(self, reason: _Wake) -> bool:
        """Wake an idle thread or start one, if the pool may. Called with the lock held."""
        if self._idle:
            self._idle -= 1
        elif len(self._threads) < self._size:
            name = f"aiorpc-def-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more: the other threads run the tasks
                if self._threads:
                    return False
                self._tasks.clear()
                raise
            self._threads.append(thread)
        else:
            return False
        self._busy += reason is _Wake.WORK
        self._wakes.put(reason)
        return True

    def _run(self) -> None:
        self._initializer()
        while (reason := self._wakes.get()) is not _Wake.END:
            if reason is _Wake.WATCH:
                self._watch()
            self._run_tasks()

    def _run_tasks(self) -> None:
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                with self._lock:
                    if self._tasks:
                        continue
                    self._busy -= 1
                    self._idle += 1
                    return
            self._last_start = time.monotonic()
            task()
            del task  # an idle thread must not keep its last arguments alive

    def _watch(self) -> None:
        """Add threads while tasks wait too long; return when this thread is to run tasks itself."""
        while True:
            seen = self._last_start
            time.sleep(STALL)
            with self._lock:
                has_stalled = seen == self._last_start
                more = len(self._tasks) if has_stalled else min(1, len(self._tasks))
                if not more or not all(self._wake(_Wake.WORK) for _ in range(more)):
                    self._is_watched = False  # no task waits, or this is the last thread
                    self._busy += 1
                    return


def daemon_thread_starter(name: str) -> Callable[[Task], None]:
    """Return a function that runs one task in a new daemon thread called `name`."""
    return lambda task: threading.Thread(target=task, name=name, daemon=True).start()


async def run_in_thread(start: Callable[[Task], None], function: Callable[[], T]) -> T:
    """Await a blocking function in the thread that `start` gives it. A cancelled one runs on."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def complete(set_outcome: Callable[[], None]) -> None:
        if not done.done():
            set_outcome()

    def work() -> None:
        try:
            value = function()
        except StopIteration as exc:  # asyncio refuses it in a future
            outcome = functools.partial(done.set_exception, RuntimeError(f"raised {exc!r}"))
        except BaseException as exc:
            outcome = functools.partial(done.set_exception, exc)
        else:
            outcome = functools.partial(done.set_result, value)
        call_soon(loop, complete, outcome)

    start(work)
    return await done


class ThreadCache:
    """Daemon threads for tasks that may block for ever: one for each task, without a limit.

    An idle thread waits `idle_timeout` seconds for the next task. A new thread, with what libraries
    keep for each, would cost more than most tasks.
    """

    def __init__(self, name: str, idle_timeout: float = 0.2) -> None:
        self._name = name
        self._idle_timeout = idle_timeout
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Task]] = []

    def __repr__(self) -> str:
        return f"<ThreadCache {self._name}, {len(self._idle)} idle>"

    def __call__(self, task: Task) -> None:
        """Run a task, which must not raise, at once. Callable from any thread."""
        with self._lock:
            if self._idle:
                self._idle.pop().put(task)
                return
        threading.Thread(target=self._run, args=(task,), name=self._name, daemon=True).start()

    def _run(self, task: Task | None) -> None:
        tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        while task is not None:
            task()
            task = None  # an idle thread must not keep its last arguments alive
            with self._lock:
                self._idle.append(tasks)
            task = self._next(tasks)

    def _next(self, tasks: "queue.SimpleQueue[Task]") -> Task | None:
        with contextlib.suppress(queue.Empty):
            return tasks.get(timeout=self._idle_timeout)
        with self._lock:
            if tasks in self._idle:
                self._idle.remove(tasks)
                return None
        return tasks.get()  # it was put after the timeout
