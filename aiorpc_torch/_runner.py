"""Where a job runs: on the loop, in a thread, or in the thread that brought it.

Knows how each kind of function is started and how its end reaches the job; not where jobs come
from, nor in which order.
"""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from torch._C import Future as AnyFuture

from ._deadline import adopt
from ._inbox import Inbox
from ._jobs import Job
from ._threads import Threads, tune
from .errors import CallTimeout


class Runner:
    """Runs jobs for one worker, on the loop that it was made on and in up to `threads` threads."""

    def __init__(self, threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # what a method sees, whoever calls it
        self._inbox: Inbox[Callable[[], None]] = Inbox(self._loop, lambda step: step())
        self._intra_op = torch.get_num_threads()
        tune(self._intra_op)
        self._threads = Threads(threads, self._intra_op)
        # RPC threads also complete replies and time-outs, and with all of them busy a process is
        # jammed: user code may have less than half of them.
        self._lent = threading.Semaphore(max(0, threads // 2 - 1))

    def __repr__(self) -> str:
        return f"<Runner {self._inbox}, {self._threads}>"

    def on_loop(self, step: Callable[[], None]) -> None:
        """Run `step` on the loop, after all that was handed over before."""
        self._inbox.push(step)

    def begin(self, job: Job) -> None:
        """Start a job whose function wants the loop. On the loop."""
        if _expired(job):
            return
        context = self._context.copy()
        context.run(adopt, job.deadline)
        try:
            value = context.run(job.call)
        except BaseException as exc:
            job.fail(exc)
            return
        if asyncio.isfuture(value):
            job.task = value
            value.add_done_callback(functools.partial(_take_asyncio, job))
        else:
            self._returned(job, value, context)

    def in_thread(self, task: Callable[[], None]) -> None:
        """Run `task` in a thread; tasks start in order. Callers hold a common lock."""
        self._threads.submit(task)

    def borrow(self) -> bool:
        """Whether this thread of torch's may run user code. Then give it back with `here`."""
        return self._lent.acquire(blocking=False)

    def here(self, task: Callable[[], None]) -> None:
        """Run `task` in this thread, borrowed from torch."""
        try:
            tune(self._intra_op)
            task()
        finally:
            self._lent.release()

    def work(self, job: Job) -> None:
        """Run a job with a plain function. In a thread."""
        if not _expired(job):
            context = self._context.copy()
            context.run(self._work, job, context)

    def _work(self, job: Job, context: contextvars.Context) -> None:
        adopt(job.deadline)
        try:
            value = job.call()
        except BaseException as exc:  # SystemExit too is the caller's to see, not this process's
            job.fail(exc)
        else:
            self._returned(job, value, context)

    def _returned(self, job: Job, value: Any, context: contextvars.Context) -> None:
        if isinstance(value, AnyFuture):  # torch's own async_execution style
            value.add_done_callback(functools.partial(_take, job))
        elif not inspect.iscoroutine(value):
            job.succeed(value)
        elif asyncio._get_running_loop() is self._loop:
            self._spawn(job, value, context)
        else:  # an `async def` behind a decorator that is a plain def
            # A copy: this thread is still inside `context`, and two threads cannot be in one.
            self._inbox.push(lambda: self._spawn(job, value, context.copy()))

    def _spawn(
        self, job: Job, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context
    ) -> None:
        task: asyncio.Task[None] = self._loop.create_task(_run(job, coroutine), context=context)
        job.task = task
        if job.abandoned:
            task.cancel()
        # A task that is cancelled before its first step never enters _run. To all others this
        # comes too late to mean anything.
        task.add_done_callback(functools.partial(_never_ran, job, coroutine))

    def close(self, patience: float) -> int:
        """End the threads; how many still run user code after so many seconds."""
        return self._threads.close(patience)


def _expired(job: Job) -> bool:
    """End a job for which nobody waits, instead of starting it."""
    if job.abandoned:
        job.fail(asyncio.CancelledError())
    elif job.is_late():
        job.fail(CallTimeout("the deadline had passed when the call was to start"))
    else:
        return False
    return True


async def _run(job: Job, coroutine: Coroutine[Any, Any, Any]) -> None:
    try:
        value = await coroutine
    except BaseException as exc:  # a KeyboardInterrupt would otherwise end the serving loop
        job.fail(exc)
    else:
        job.succeed(value)


def _never_ran(job: Job, coroutine: Coroutine[Any, Any, Any], _: "asyncio.Task[None]") -> None:
    coroutine.close()
    job.fail(asyncio.CancelledError())


def _take(job: Job, future: "AnyFuture[Any]") -> None:
    try:
        value = future.wait()
    except Exception as exc:
        job.fail(exc)
    else:
        job.succeed(value)


def _take_asyncio(job: Job, future: "asyncio.Future[Any]") -> None:
    if future.cancelled():
        job.fail(asyncio.CancelledError())
    elif (exc := future.exception()) is not None:
        job.fail(exc)
    else:
        job.succeed(future.result())
