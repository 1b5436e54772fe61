"""Threads for plain `def` methods. Knows of torch only its intra-op thread count.

Not `concurrent.futures` or anyio's: both join their threads when the interpreter exits, so one
method that never returns would keep a process alive for ever. These are daemons.
"""

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

Task = Callable[[], None]

_thread = threading.local()


def tune(intra_op: int) -> None:
    """Tell this thread torch's intra-op thread count, once.

    A thread that was never told opens an OpenMP team of its own for each operator: a 64-row MLP
    took 18 ms in place of 0.1 (torch 2.13, two cores).
    """
    if getattr(_thread, "intra_op", None) != intra_op:
        torch.set_num_threads(intra_op)
        _thread.intra_op = intra_op


class Threads:
    """At most `size` daemon threads, started when they are needed. Tasks start in order."""

    def __init__(self, size: int, intra_op: int) -> None:
        self._size = size
        self._intra_op = intra_op
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def __repr__(self) -> str:
        return f"<Threads {len(self._threads)} of {self._size}, {self._tasks.qsize()} waiting>"

    def submit(self, task: Task) -> None:
        """Run `task`, which must not raise, in one of the threads. Callers hold a common lock."""
        self._tasks.put(task)
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._size:
            self._start()

    def close(self, patience: float) -> int:
        """Let the threads end; how many still run a task after `patience` seconds."""
        for _ in self._threads:
            self._tasks.put(None)
        end = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        name = f"aiorpc-def-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        tune(self._intra_op)
        while (task := self._tasks.get()) is not None:
            task()
            del task  # a thread that waits must not keep its last arguments alive
            self._idle.release()


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
