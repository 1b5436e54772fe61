"""Where a job runs: on the loop, in a thread, or in the thread that brought it.

Knows how each kind of function is started and how its end reaches the job; not where jobs come
from, nor in which order.
"""

import asyncio
import contextvars
import functools
import inspect
import logging
import threading
import types
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context
from typing import Any

import torch
from torch._C import Future as AnyFuture

from ._deadline import adopt
from ._eager import Host
from ._errands import set_out
from ._inbox import Inbox
from ._jobs import Job, Join
from ._recording import enter
from ._steps import timed
from ._streams import StreamJob, check_streamable, run_in_thread, stream
from ._threads import Threads, tune
from .errors import CallTimeout

log = logging.getLogger("aiorpc_torch")

PAUSE = 0.0005  # seconds from a result in a thread until it is sent, with what came meanwhile


class Runner:
    """Runs jobs for one worker, on the loop that it was made on and in up to `threads` threads."""

    def __init__(self, threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # what a method sees, whoever calls it
        self._context.run(adopt, None)
        self._context.run(set_out, ())
        self._context.run(enter, None)
        self._inbox: Inbox[Callable[[], None]] = Inbox(self._loop, lambda step: step())
        self._intra_op = torch.get_num_threads()
        tune(self._intra_op)
        self._threads = Threads(threads, self._intra_op)
        self._closed = False
        self._host: Host | None = None
        self._waits: set[types.CodeType] = set()  # of functions that have had to wait
        self._behind = 0  # first steps and cancellations that wait for the next turn
        # RPC threads also complete replies and time-outs, and with all of them busy a process is
        # jammed: user code may have less than half of them.
        self._to_lend = max(0, threads // 2 - 1)
        self._lent = 0
        self._lending = threading.Lock()

    def __repr__(self) -> str:
        return f"<Runner {self._inbox}, {self._threads}>"

    def on_loop(self, step: Callable[[], None]) -> None:
        """Run `step` on the loop, after all that was handed over before."""
        self._inbox.push(step)

    def after_turn(self, step: Callable[[], None]) -> None:
        """Run `step` on the loop once this turn of it is over; from a thread, soon."""
        if asyncio._get_running_loop() is self._loop:
            self._loop.call_soon(step)
        else:  # its next results come from the same thread: with a few of them
            self._inbox.push(functools.partial(self._later, step))

    def _later(self, step: Callable[[], None]) -> None:
        self._loop.call_later(PAUSE, step)

    def in_threads(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Run each task in a thread; they start in order."""
        self._threads.submit(tasks)

    def borrow(self) -> bool:
        """Whether this thread of torch's may run user code. Then give it back with `here`."""
        with self._lending:
            free = self._to_lend > 0
            self._to_lend -= free
            self._lent += free
            return free

    def here(self, job: Job) -> None:
        """Run a job with a plain function in this thread, borrowed from torch."""
        try:
            tune(self._intra_op)
            self.work(job)
        finally:
            with self._lending:
                self._to_lend += 1
                self._lent -= 1

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    def begin(self, job: Job) -> None:
        """Start a job whose function wants the loop."""
        if _expired(job):
            return
        if job.join is not None:
            is_alone = job.errand is None and job.recording is None
            context = self._context if is_alone else self._context.copy()
            context.run(_join, job, job.join)
        else:
            self._start(job)

    def hold(self) -> None:
        """Start nothing at once until what this turn has scheduled is done, in the next."""
        self._behind += 1
        self._loop.call_soon(self._release)

    def _release(self) -> None:
        self._behind -= 1

    def _start(self, job: Job) -> None:
        context = self._context.copy()
        code = getattr(job.function, "__code__", None)
        # Not before those who came before it and have yet to start.
        if not self._behind and code is not None and self._is_ready(code):
            job.task = self._at_once(code, _run(job), context)
            return
        job.task = self._loop.create_task(_run(job), name=job.name, context=context)
        self.hold()
        self._renew()

    def start(
        self, code: types.CodeType | None, coroutine: Coroutine[Any, Any, None], name: str
    ) -> "asyncio.Task[None] | None":
        """Start what is nobody's job, on the running loop; its task, or None if it is done.

        `code` is the function's in it that may wait, None if it will. It must not raise.
        """
        loop = asyncio.get_running_loop()
        if loop is self._loop and code is not None:
            if self._is_ready(code):
                return self._at_once(code, coroutine, Context())
            self._renew()
        return loop.create_task(coroutine, name=name, context=Context())

    def _is_ready(self, code: types.CodeType) -> bool:
        return code not in self._waits and self._host is not None and self._host.is_free()

    def _at_once(
        self, code: types.CodeType, coroutine: Coroutine[Any, Any, None], context: Context
    ) -> "asyncio.Task[None] | None":
        host, task = self._host, None
        assert host is not None
        if not host.run(coroutine, context):
            task = host.task
            self._waits.add(code)
        self._renew()
        return task

    def _renew(self) -> None:
        if not self._closed and (self._host is None or self._host.is_gone()):
            self._host = Host()

    def _go_on(self, job: Job, value: Any, context: contextvars.Context) -> None:
        job.task = self._loop.create_task(_run(job, value), name=job.name, context=context)

    # ── in a thread ─────────────────────────────────────────────────────────────────────────────

    def work(self, job: Job) -> None:
        """Run a job with a plain function."""
        if not _expired(job):
            self._context.copy().run(self._work, job)

    def _work(self, job: Job) -> None:
        try:
            value = job.call() if job.recording is None else job.recording.run(job.call)
        except BaseException as exc:  # SystemExit too is the caller's to see, not this process's
            job.fail(exc)
        else:
            self._returned(job, value)

    def _returned(self, job: Job, value: Any) -> None:
        # torch's own async_execution style; who iterates is told that it is no generator
        if isinstance(value, AnyFuture) and not isinstance(job, StreamJob):
            value.add_done_callback(functools.partial(_take, job))
        elif inspect.iscoroutine(value) or hasattr(type(value), "__anext__"):
            # An `async def` behind a decorator that is a plain def. A copy of the context: this
            # thread is still inside it, and two threads cannot be in one.
            context = contextvars.copy_context()
            self.on_loop(functools.partial(self._go_on, job, value, context))
        elif isinstance(job, StreamJob):
            self._stream_in_thread(job, value)
        else:
            job.succeed(value)

    def _stream_in_thread(self, job: StreamJob, value: Any) -> None:
        try:
            check_streamable(value, job.name)
        except TypeError as exc:
            job.fail(exc)
        else:
            run_in_thread(job, value, lambda task: self.in_threads((task,)))

    def close(self, patience: float, name: str) -> bool:
        """End threads and host of that worker; whether torch's threads still run user code."""
        self._closed = True
        if self._host is not None:
            self._host.close()
        if stuck := self._threads.close(patience) + self._lent:
            log.warning("%d plain `def` calls still run on worker %s", stuck, name)
        return self._lent > 0


def _expired(job: Job) -> bool:
    """End a job for which nobody waits, instead of starting it."""
    if job.abandoned:
        job.fail(asyncio.CancelledError())
    elif job.is_late():
        job.fail(CallTimeout("the deadline had passed when the call was to start"))
    else:
        return False
    return True


def _join(job: Job, join: Join) -> None:
    job.set_out()
    try:
        job.leave = join(job.settle, job.take_work(), job.caller)
    except BaseException as exc:  # as for any function of the user's
        job.fail(exc)


_NOT_YET = object()


async def _run(job: Job, value: Any = _NOT_YET) -> None:
    """Run a job to its end: one frame for each call that waits, of a hundred thousand perhaps.

    `value` is what its function has returned already, in a thread.
    """
    job.begun = True
    if job.abandoned and value is _NOT_YET:
        job.fail(asyncio.CancelledError())
        return
    if job.abandoned and (task := asyncio.current_task()):
        task.cancel()  # the coroutine sees it at its first await
    try:
        if value is _NOT_YET:
            value = job.call()
        if inspect.isawaitable(value):
            value = await (timed(value, job.name) if inspect.iscoroutine(value) else value)
        if isinstance(job, StreamJob):
            check_streamable(value, job.name)
            await stream(job, value)
    except BaseException as exc:  # a KeyboardInterrupt would otherwise end the serving loop
        job.fail(exc)
    else:
        job.succeed(value)


def _take(job: Job, future: "AnyFuture[Any]") -> None:
    try:
        value = future.wait()
    except BaseException as exc:  # of whatever class the worker named that completed it
        job.fail(exc)
    else:
        job.succeed(value)
