"""The callee: from a message to the loop or to a thread, and the result back.

`accept` runs on a thread of torch's and hands over: what wants the loop goes through one inbox, a
plain `def` to a thread. The room knows nothing of what `@batched` is (only that some callables
want the loop), nor how a message comes in or a caller waits.
"""

import asyncio
import contextvars
import functools
import inspect
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import torch
from torch._C import Future as AnyFuture
from torch.futures import Future

from ._deadline import adopt
from ._exceptions import Failure
from ._inbox import Inbox
from ._jobs import Devices, Job, RpcJob, TorchJob, runs_on_loop
from ._lane import Lane
from ._threads import Threads, tune
from ._wire import Call, Cancel, Create, Goodbye, Message
from .errors import CallTimeout, NotServing

log = logging.getLogger("aiorpc_torch")


class _Start(NamedTuple):
    """How a message takes effect once its turn has come."""

    run: Callable[[], None]
    on_loop: bool = True


class Server:
    """Answers calls on the loop that it was made on, from then until `close`."""

    def __init__(self, name: str, threads: int, devices: Devices) -> None:
        self.name = name
        self._devices = devices
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # what a method sees, whoever calls it
        self._inbox: Inbox[Callable[[], None]] = Inbox(self._loop, lambda step: step())
        self.goodbyes: dict[str, Goodbye] = {}  # each peer's latest
        self._farewells: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._lock = threading.Lock()
        self._lanes: defaultdict[str, Lane[_Start]] = defaultdict(Lane)
        self._early: list[_Start] | None = []  # until `open`
        self._jobs: dict[Any, Job] = {}
        self._intra_op = torch.get_num_threads()
        tune(self._intra_op)
        self._threads = Threads(threads, self._intra_op)
        # RPC threads also complete replies and time-outs, and with all of them busy a process is
        # jammed: user code may have less than half of them.
        self._inline = threading.Semaphore(max(0, threads // 2 - 1))

    def __repr__(self) -> str:
        return f"<Server {self.name}: {len(self._jobs)} running, {self._threads}>"

    # ── on a thread of torch's ──────────────────────────────────────────────────────────────────

    def accept(self, message: Message) -> "Future[Any]":
        """Take a message in. A call's future completes with its `Packed` or `Failure`."""
        if isinstance(message, Call):
            return self._accept_call(message)
        if isinstance(message, Cancel):
            step = functools.partial(self._abandon, (message.caller, message.call))
        else:
            step = functools.partial(self._note_goodbye, message)
        self._in_order(message, _Start(step))
        return completed(None)

    def _accept_call(self, call: Call) -> "Future[Any]":
        job = self._job(call)
        if runs_on_loop(job.function):
            start = _Start(functools.partial(self._begin, job))
        else:
            start = _Start(functools.partial(self._work, job), on_loop=False)
        self._in_order(call, start)
        return job.reply

    def accept_torch(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> "Future[Any]":
        """Run `function`, which wants the loop, for a plain torch client."""
        job = TorchJob(self, function, args, kwargs, self._devices)
        self._jobs[job] = job
        self._inbox.push(functools.partial(self._begin, job))
        return job.reply

    def _job(self, call: Call) -> Job:
        assert not hasattr(call.work, "tensors"), "work arrives unpacked"
        if isinstance(call.work, Failure):
            function, args, kwargs, as_rref = call.work.throw, (), {}, False
        else:
            target, args, kwargs = call.work.value
            as_rref = isinstance(target, Create)
            try:
                function = target.bind()
            except Exception as exc:
                function, args, kwargs = Failure.of(exc, self.name).throw, (), {}
        job = RpcJob(self, function, args, kwargs, self._devices)
        job.key, job.budget, job.as_rref = (call.caller, call.seq), call.budget, as_rref
        self._jobs[job.key] = job
        return job

    def _in_order(self, message: Message, start: _Start) -> None:
        with self._lock:
            due = self._lanes[message.caller].arrived(message.seq, start)
            if self._early is not None:
                self._early += due
                return
            # Here and now, while threads are idle and nobody else's turn has come with ours: a
            # lone `def` is answered without a change of threads.
            here = len(due) == 1 and not start.on_loop and self._inline.acquire(blocking=False)
            if not here:
                for step in due:
                    self._hand_over(step)
        if here:
            try:
                tune(self._intra_op)
                start.run()
            finally:
                self._inline.release()

    def open(self) -> None:
        """This process has joined its world: start what its quicker peers have sent already."""
        with self._lock:
            early, self._early = self._early or [], None
            for step in early:
                self._hand_over(step)

    def _hand_over(self, step: _Start) -> None:
        if step.on_loop:
            self._inbox.push(step.run)
        else:
            self._threads.submit(step.run)

    def lend_thread(self, task: Callable[[], None]) -> None:
        """Run `task` in one of the threads for plain `def`s."""
        with self._lock:
            self._threads.submit(task)

    # ── in a thread, for a plain `def` ──────────────────────────────────────────────────────────

    def _work(self, job: Job) -> None:
        if not self._expired(job):
            self._context.copy().run(self._call, job)

    def _call(self, job: Job) -> None:
        adopt(job.budget)
        try:
            value = job.call()
        except BaseException as exc:  # SystemExit too is the caller's to see, not this process's
            job.fail(exc)
        else:
            self._returned(job, value)

    def _returned(self, job: Job, value: Any) -> None:
        if isinstance(value, AnyFuture):  # torch's own async_execution style
            value.add_done_callback(functools.partial(_take, job))
        elif inspect.iscoroutine(value):  # an `async def` behind a decorator that is a plain def
            context = contextvars.copy_context()
            self._inbox.push(lambda: self._spawn(job, value, context))
        else:
            job.succeed(value)

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    def _begin(self, job: Job) -> None:
        if self._expired(job):
            return
        context = self._context.copy()
        context.run(adopt, job.budget)
        try:
            value = context.run(job.call)
        except BaseException as exc:
            job.fail(exc)
            return
        if inspect.iscoroutine(value):
            self._spawn(job, value, context)
        elif asyncio.isfuture(value):
            job.task = value
            value.add_done_callback(functools.partial(_take_asyncio, job))
        else:
            self._returned(job, value)

    def _spawn(
        self, job: Job, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context
    ) -> None:
        task: asyncio.Task[None] = self._loop.create_task(_run(job, coroutine), context=context)
        job.task = task
        # A task that is cancelled before its first step never enters _run. To all others this
        # comes too late to mean anything.
        task.add_done_callback(functools.partial(_never_ran, job, coroutine))

    def _expired(self, job: Job) -> bool:
        """End a job for which nobody waits, instead of starting it."""
        if job.abandoned:
            job.fail(asyncio.CancelledError())
        elif job.budget is not None and job.budget <= 0.0:
            job.fail(CallTimeout("the deadline had passed when the call was to start"))
        else:
            return False
        return True

    def _abandon(self, key: Any) -> None:
        job = self._jobs.get(key)
        if job is not None:
            job.abandon()

    def _note_goodbye(self, message: Goodbye) -> None:
        self.goodbyes[message.caller] = message
        self.farewell(message.caller).set()

    def farewell(self, peer: str) -> asyncio.Event:
        """Set once `peer` has said goodbye, or was found lost."""
        return self._farewells[peer]

    def ended(self, job: Job) -> bool:
        """Forget `job`; False if it had ended already."""
        return self._jobs.pop(job.key, None) is not None

    async def close(self, patience: float) -> None:
        """Cancel what runs, and answer everybody. Coroutines have `patience` seconds to end."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.abandon()
        tasks = [job.task for job in jobs if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=patience)
        for job in list(self._jobs.values()):
            log.warning("%s did not end when its worker %s stopped", job, self.name)
            job.fail(NotServing(f"worker {self.name!r} has stopped"))
        stuck = self._threads.close(patience=0.1)
        if stuck:
            log.warning("%d plain `def` calls still run on worker %s", stuck, self.name)


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


def _take(job: Job, future: "Future[Any]") -> None:
    try:
        value = future.value()
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


def completed(value: Any) -> "Future[Any]":
    """A torch future that is done."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
