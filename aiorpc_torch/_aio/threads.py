"""Threads for plain `def` methods.

Not `concurrent.futures` or anyio's: both join their threads when the interpreter exits, so one
method that never returns would keep a process alive for ever. These are daemons.
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

T = TypeVar("T")

Task = Callable[[], None]

PATIENCE = 0.001  # seconds that a task waits for a thread at work before another one comes


class _Wake(enum.Enum):
    """What an idle thread is woken for."""

    WORK = enum.auto()
    WATCH = enum.auto()
    END = enum.auto()


class Threads:
    """At most `size` daemon threads, started when they are needed. Tasks start in order.

    One thread takes task after task, which costs no change of threads. Another watches it: what
    waits for more than a millisecond gets a thread more, and if none moves, as many as there are.
    """

    def __init__(self, size: int, initialize: Task) -> None:
        self._size = size
        self._initialize = initialize  # run once in each thread
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._wakes: queue.SimpleQueue[_Wake] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._busy = 0
        self._watched = False
        self._last_start = 0.0

    def __repr__(self) -> str:
        return f"<Threads {self._busy} busy of {self._size}, {len(self._tasks)} tasks waiting>"

    def submit(self, tasks: Iterable[Task]) -> None:
        """Run tasks, which must not raise, each in one of the threads. From any thread.

        Raises:
            RuntimeError: if there is no thread, and the system can start none.
        """
        with self._lock:
            self._tasks.extend(tasks)
            # Threads that started their last task long ago will not come for these at once.
            late = not self._busy or time.monotonic() - self._last_start > PATIENCE
            woken = late and self._wake(_Wake.WORK)
            if not self._watched and len(self._tasks) > woken:
                self._watched = self._wake(_Wake.WATCH)

    def close(self, patience: float) -> int:
        """Let the threads end; how many still run a task after `patience` seconds."""
        with self._lock:
            self._size = 0  # none is started any more
            for _ in self._threads:
                self._wakes.put(_Wake.END)
        end = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _wake(self, what: _Wake) -> bool:
        """Have one more thread, if there may be one. Under the lock."""
        if self._idle:
            self._idle -= 1
        elif len(self._threads) < self._size:
            name = f"aiorpc-def-{len(self._threads)}"
            thread = threading.Thread(target=self._live, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more: those that there are take the tasks
                if self._threads:
                    return False
                self._tasks.clear()
                raise
            self._threads.append(thread)
        else:
            return False
        self._busy += what is _Wake.WORK
        self._wakes.put(what)
        return True

    def _live(self) -> None:
        self._initialize()
        while (what := self._wakes.get()) is not _Wake.END:
            if what is _Wake.WATCH:
                self._watch()
            self._work()

    def _work(self) -> None:
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
            del task  # a thread that waits must not keep its last arguments alive

    def _watch(self) -> None:
        """Look after the tasks that wait, then join in the work."""
        while True:
            seen = self._last_start
            time.sleep(PATIENCE)
            with self._lock:
                stuck = seen == self._last_start
                more = len(self._tasks) if stuck else min(1, len(self._tasks))
                if not more or not all(self._wake(_Wake.WORK) for _ in range(more)):
                    self._watched = False  # nothing waits, or there is no thread left but this
                    self._busy += 1
                    return


def daemon(name: str) -> Callable[[Task], None]:
    """A way to start one task: in a daemon thread of its own, called `name`."""
    return lambda task: threading.Thread(target=task, name=name, daemon=True).start()


async def run_blocking(start: Callable[[Task], None], function: Callable[[], T]) -> T:
    """Await a blocking function that `start` runs in some thread; cancelled, it runs on there."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(settler: Callable[[], None]) -> None:
        if not done.done():
            settler()

    def work() -> None:
        try:
            value = function()
        except StopIteration as exc:  # asyncio refuses it in a future
            settler = functools.partial(done.set_exception, RuntimeError(f"raised {exc!r}"))
        except BaseException as exc:
            settler = functools.partial(done.set_exception, exc)
        else:
            settler = functools.partial(done.set_result, value)
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, settler)

    start(work)
    return await done


class Spare:
    """Daemon threads for what may block for ever: each task has one, and none waits for another.

    A thread that has nothing to do waits for some time for the next task: starting one, and what
    libraries keep for each, would cost more than most tasks.
    """

    def __init__(self, name: str, patience: float = 0.2) -> None:
        self._name = name
        self._patience = patience  # seconds
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Task]] = []

    def __repr__(self) -> str:
        return f"<Spare {self._name}, {len(self._idle)} idle>"

    def __call__(self, task: Task) -> None:
        """Run a task, which must not raise, at once. From any thread."""
        with self._lock:
            if self._idle:
                self._idle.pop().put(task)
                return
        threading.Thread(target=self._live, args=(task,), name=self._name, daemon=True).start()

    def _live(self, task: Task | None) -> None:
        inbox: queue.SimpleQueue[Task] = queue.SimpleQueue()
        while task is not None:
            task()
            task = None  # a thread that waits must not keep its last arguments alive
            with self._lock:
                self._idle.append(inbox)
            task = self._next(inbox)

    def _next(self, inbox: "queue.SimpleQueue[Task]") -> Task | None:
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=self._patience)
        with self._lock:
            if inbox in self._idle:
                self._idle.remove(inbox)
                return None
        return inbox.get()  # it came just now
