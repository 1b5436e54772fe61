"""Where a job runs: on the loop, or in a thread.

Knows how each kind of function is started and how its end reaches the job; not where jobs come
from, nor in which order.
"""

import asyncio
import contextvars
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context
from types import CoroutineType
from typing import Any

import torch

from .._aio.deadlines import adopt
from .._aio.entry_queue import Inbox
from .._aio.tasks import timed
from .._aio.threads import Threads
from .._protocol.ancestry import set_out
from .._protocol.recording import enter
from .._torch.compat import RawFuture
from .._torch.thread_state import tune
from ..errors import CallTimeout
from .calls import Job, Join
from .stream_writer import StreamJob, check_streamable, run_in_thread, stream

log = logging.getLogger("aiorpc_torch")

# From Python 3.12 on a coroutine takes its first step at once: one that never waits is done without
# a loop iteration of its own.
_EAGER: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}


def start_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, None],
    name: str,
    context: Context,
) -> "asyncio.Task[None]":
    """Return a task for `coroutine`. Outside any task."""
    return asyncio.Task(coroutine, loop=loop, name=name, context=context, **_EAGER)


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
        self._threads = Threads(threads, functools.partial(tune, self._intra_op))
        self._is_behind = False  # whether cancelled coroutines have yet to see it

    def __repr__(self) -> str:
        return f"<Runner {self._inbox}, {self._threads}>"

    def on_loop(self, step: Callable[[], None]) -> None:
        """Run `step` on the loop, after all that was handed over before."""
        self._inbox.push(step)

    def in_threads(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Run each task in a thread; they start in order."""
        self._threads.submit(tasks)

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

    def cancel(self, job: Job) -> None:
        """Cancel a job: its coroutine sees that before jobs that come later start."""
        job.abandon()
        if not self._is_behind:
            self._is_behind = True
            self._loop.call_soon(self._caught_up)

    def _caught_up(self) -> None:
        self._is_behind = False

    def _start(self, job: Job) -> None:
        context = self._context.copy()
        if self._is_behind:  # cancelled coroutines have their step first
            job.task = self._loop.create_task(_run(job), name=job.name, context=context)
        else:
            job.task = start_task(self._loop, _run(job), job.name, context)

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Start what is nobody's job, on the running loop. It must not raise."""
        return start_task(asyncio.get_running_loop(), coroutine, name, Context())

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
        if isinstance(value, RawFuture) and not isinstance(job, StreamJob):
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

    def close(self, patience: float, name: str) -> None:
        """End the threads of that worker; those that still run user code are counted in the log."""
        if stuck := self._threads.close(patience):
            log.warning("%d plain `def` calls still run on worker %s", stuck, name)


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
        if type(value) is CoroutineType:  # mostly
            value = await timed(value, job.name)
        elif inspect.isawaitable(value):
            value = await (timed(value, job.name) if inspect.iscoroutine(value) else value)
        if isinstance(job, StreamJob):
            check_streamable(value, job.name)
            await stream(job, value)
    except BaseException as exc:  # a KeyboardInterrupt would otherwise end the serving loop
        job.fail(exc)
    else:
        job.succeed(value)


def _take(job: Job, future: "RawFuture[Any]") -> None:
    try:
        value = future.wait()
    except BaseException as exc:  # of whatever class the worker named that completed it
        job.fail(exc)
    else:
        job.succeed(value)
