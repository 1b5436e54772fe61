"""The queue of one `@batched` function and instance: runs its batches on the loop that awaits them.

The queue drives a scheduler: it keeps one timer and the waiting calls, and asks after every event.
The scheduler decides when a batch starts; `results` splits the result per caller.
"""

import asyncio
import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from sys import modules
from typing import Any, TypeVar

from .._aio.identity import WeakIdentityDict
from .._aio.tasks import Steps, detach_task
from .._context import propagation
from .._context.cancellation import ask_whether_given_up
from .._context.interception import TRACER, CallInfo, End, caller_context, enter_batch
from .._context.recording import ContextRecord, current_record, enter_record
from .._endpoint.entry_points import serving
from .._turns.turns import turns_of
from .._wire.ancestry import (
    BATCH,
    BatchId,
    BatchScope,
    ancestor_batches,
    current_scopes,
    enter_scopes,
    entered_scopes,
    new_batch,
    note_call,
)
from .._wire.columns import SharedValue
from .._wire.exceptions import LeavingWorker, note_has_run
from ..errors import NotInWorld, QueueFull, RoundTimeout, RpcError
from .function import BatchFunction, CallArgs, TraitsFunction
from .policies import Fill, Policy, has_functions, numbers_of
from .results import failure_per_caller
from .rounds import RoundScheduler
from .scheduler import DEFAULT_TRAITS, Batch, FillScheduler, Scheduler, TimedOutRound
from .stats import BatchCounters
from .streams import StreamedBatch

CANCEL_TIMEOUT = 0.5  # seconds that a cancelled function may take to end when its worker stops

LOCAL_CALLER = "a local caller"
"""The caller of a batched function in a process without a worker."""

# Functions of C: comprehensions are functions of Python until 3.12.
_ARGS, _ARRIVAL, _SCOPES = map(attrgetter, ("args", "arrival", "scopes"))

T = TypeVar("T")

ResultCallback = Callable[[Any], None]
"""Called with the result of one call: a value, or an exception to raise."""


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A batch that runs. It must not refer to its members: the function's context outlives them."""

    task: "asyncio.Task[None]"
    recording: ContextRecord | None
    """That of every member, or None."""
    id: BatchId
    is_finished: bool = False
    """Its callers may get their results."""


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call that waits in a queue or in a running batch."""

    queue: "BatchQueue"
    instance: Any
    args: CallArgs
    on_result: ResultCallback
    arrival: float
    caller: str
    receiver: Any
    """Receives the items, as `LocalItems`, if the function is a generator; else None."""
    scopes: frozenset[BatchScope]
    recording: ContextRecord | None
    context: contextvars.Context | None
    on_leave: Callable[[], object] | None = None
    """Is called when the caller leaves the batch that runs."""

    @property
    def has_left(self) -> bool:
        """Return whether the call has its result, or its caller has left. In any thread."""
        return self.on_result is _ignore

    def resolve(self, result: Any) -> None:
        """Pass the result to the caller, and release the caller and the arguments."""
        # The caller refers to this call, to cancel it: without the reset they are a cycle.
        on_result, self.on_result, self.args = self.on_result, _ignore, ()
        self.receiver = None
        on_result(result)

    def batch(self) -> RunningBatch | None:
        """Return the batch that it is in, None while it waits for one."""
        found = (each for batch, each in self.queue._running.items() if self in batch.items)
        return next(found, None)

    def cancel(self) -> None:
        """Leave the queue. In a running batch, only drop the result."""
        if self.has_left:
            return
        self.on_result = _ignore
        if self.queue.discard(self):
            self.args = ()
        elif self.on_leave is not None:
            self.on_leave()


def _ignore(_: Any) -> None:
    """Ignore the result: the call was cancelled or resolved before."""


class QueuedFuture(asyncio.Future[Any]):
    """The future of a local caller. Cancelling it cancels the queued call at once."""

    call: QueuedCall | None = None

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        call, self.call = self.call, None
        if cancelled and call is not None:
            call.cancel()
        return cancelled

    def resolve(self, result: Any) -> None:
        """Set the result or the exception, unless the future is done."""
        if self.done():
            return
        if isinstance(result, BaseException):
            self.set_exception(result)
        else:
            self.set_result(result.value if type(result) is SharedValue else result)


class BatchQueue:
    """The calls that wait for one function on one instance, and the batches that run."""

    def __init__(
        self,
        function: BatchFunction,
        policy: Policy,
        traits_of: TraitsFunction | None,
        counters: BatchCounters,
        *,
        has_limit: bool,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._function = function
        self._given = policy
        self._policy = policy  # with the numbers that its functions have returned last
        self._traits_of = traits_of
        self._counters = counters
        self._has_limit = has_limit  # the object does
        self._varies = has_functions(policy)
        self._is_bounded = getattr(policy, "max_pending", None) is not None
        self._scheduler = _new_scheduler(policy)
        self._running: dict[Batch[QueuedCall], RunningBatch] = {}
        self._dispatching: asyncio.Task[None] | None = None  # begins in the next loop iteration
        self._timer: asyncio.TimerHandle | None = None  # at the scheduler's deadline
        counters.queues.set(self, None)
        _queues.set(self, None)

    def __len__(self) -> int:
        return len(self._scheduler)

    def submit(self, instance: Any, args: CallArgs, caller: str) -> QueuedFuture:
        """Enqueue a local call; return the future of its result."""
        future = QueuedFuture(loop=asyncio.get_running_loop())
        future.call = self.join(instance, args, future.resolve, caller)
        return future

    def join(
        self,
        instance: Any,
        args: CallArgs,
        on_result: ResultCallback,
        caller: str,
        receiver: Any = None,
    ) -> QueuedCall:
        """Enqueue a call. `on_result` is called once, unless the call is cancelled.

        `receiver` gets the items of a generator before.
        """
        if scopes := entered_scopes():
            self._reject_reentry(instance)
            scopes = current_scopes()
        context = caller_context() if propagation.used or TRACER in modules else None
        recording = current_record()
        loop = asyncio.get_running_loop()
        if self.loop is not loop:
            self._bind_loop(loop)
        if self._varies:
            self._renew_numbers(instance)
        if self._is_bounded and not self._scheduler.can_accept():
            name, limit = self._function.name, len(self)
            text = f"{name}: queue full (max_pending={limit}). Retry later or raise max_pending"
            raise QueueFull(text)
        now = loop.time()
        call = QueuedCall(
            self, instance, args, on_result, now, caller, receiver, scopes, recording, context
        )
        traits = DEFAULT_TRAITS if self._traits_of is None else self._traits_of(args, caller)
        if recording is not None and isinstance(self._policy, Fill):
            # Calls of two autograd contexts never share a batch: its members have one graph, which
            # a backward of either would free.
            traits = traits._replace(key=(recording.id, traits.key))
        self._scheduler.add(call, now, traits)
        if self._dispatching is None or self._dispatching.done():  # as `_schedule_dispatch`
            self._dispatching = self._new_task()
        return call

    def _renew_numbers(self, instance: Any) -> None:
        """Follow the numbers of the policy that are functions of the object."""
        policy: Any = numbers_of(self._given, instance)
        self._counters.note_numbers(policy)
        if policy != self._policy:
            self._policy = policy
            self._scheduler.use(policy)
            self._schedule_dispatch()  # a batch of those that wait may be ready now

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return self._function.name

    def why_waiting(self) -> str:
        """Return what the calls wait for, for people."""
        if not isinstance(self._scheduler, RoundScheduler):
            return f"waits for its batch; calls that wait: {len(self)}"
        size, present, missing = self._scheduler.next_round()
        text = f"waits for its round: {len(present)} of {size} are there ({_names(present[:8])})"
        return f"{text}; missing: {_names(missing[:8])}" if missing else text

    def running(self) -> list[RunningBatch]:
        """Return the batches that run."""
        return [*self._running.values()]

    def discard(self, call: QueuedCall) -> bool:
        """Remove a cancelled call; return False if its batch has started."""
        waited = bool(self._ask(self._scheduler.discard, call))
        if waited and not self._is_loop_closed():
            self._schedule_dispatch()
        return waited

    async def close(self) -> None:
        """Fail every waiting and running call, and cancel the running batches."""
        queued = self._scheduler.close()
        tasks = [batch.task for batch in self._running.values()]
        if queued:
            self._counters.reasons["closed"] += 1
        running = [call for batch in self._running for call in batch.items]
        for calls, may_have_run in ((queued, False), (running, True)):
            for call in calls:
                call.resolve(self._left(call.caller, may_have_run))
        for task in tasks:
            task.cancel()
        for task in tasks and (await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT))[1]:
            detach_task(task, self._function.name)

    def _left(self, caller: str, may_have_run: bool) -> RpcError:
        """Return the error of a call of this worker, or of another, as this worker leaves."""
        server, name = serving(), self._function.name
        worker = LOCAL_CALLER if server is None else server.name
        if caller in (worker, LOCAL_CALLER):
            text = f"this worker left its world before {name} returned"
            return NotInWorld(text, may_have_run=may_have_run)
        return LeavingWorker(worker, method=name, may_have_run=may_have_run)

    def _reject_reentry(self, instance: Any) -> None:
        batches = ancestor_batches()
        if batches and self._has_limit:
            turns_of(instance).refuse_own_call(self._function.name, batches)
        if batches and any(batch.id in batches for batch in self._running.values()):
            raise RuntimeError(
                f"{self._function.name} awaits itself: this call would wait for the batch that "
                "makes it. Call the undecorated function, or another instance"
            )

    def _bind_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.loop is not None and self._is_loop_closed():
            self._scheduler = _new_scheduler(self._policy)  # the calls ended with their loop
            self._running.clear()
        elif not self._scheduler.is_idle:
            raise RuntimeError(
                f"{self._function.name} is busy on another event loop: "
                "call it there, or on another instance"
            )
        if self._timer is not None:
            self._timer.cancel()
        self.loop, self._dispatching, self._timer = loop, None, None

    def _is_loop_closed(self) -> bool:
        return self.loop is None or self.loop.is_closed()

    def _schedule_dispatch(self) -> None:
        if self._dispatching is None or self._dispatching.done():
            self._dispatching = self._new_task()

    def _new_task(self, batch: Batch[QueuedCall] | None = None) -> "asyncio.Task[None]":
        """Return a task of `_run_batch(batch)`."""
        # It starts in the next iteration, so that the calls of one iteration share a batch: an
        # eager task factory is not asked. In an empty context: under no caller's deadline.
        context, name = contextvars.Context(), self._function.name
        task = asyncio.Task(self._run_batch(batch), loop=self.loop, name=name, context=context)
        task.add_done_callback(self._on_early_cancel)
        return task

    def _on_early_cancel(self, task: "asyncio.Task[None]") -> None:
        """Handle a task that was cancelled before its first step, by code that cancels all."""
        if self._is_loop_closed():
            return
        for batch, running in [*self._running.items()]:
            if running.task is task:
                error = asyncio.CancelledError()
                size, name = len(batch.items), self._function.name
                self._finish_batch(batch, running, failure_per_caller(error, size, name))
        if self._scheduler.waiting:
            self._schedule_dispatch()

    def _dispatch(self, task: "asyncio.Task[None]") -> Batch[QueuedCall] | None:
        """Start the batches that are ready, but for the first: `task`, the current one, runs it.

        So a batch costs one task and one loop iteration.
        """
        assert self.loop is not None
        self._dispatching = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        scheduler, now = self._scheduler, self.loop.time()
        first: Batch[QueuedCall] | None = None
        while (batch := self._ask(scheduler.next_batch, now)) is not None:
            if isinstance(batch, TimedOutRound):
                self._counters.reasons["timeout"] += 1
                for call in batch.items:
                    call.resolve(_round_timeout(batch, self._function.name))
                continue
            waits = [*map(now.__sub__, map(_ARRIVAL, batch.items))]
            self._counters.count_batch(batch.reason._value_, waits, batch.weight)
            recording = batch.items[0].recording if isinstance(self._policy, Fill) else None
            runner = task if first is None else self._new_task(batch)
            self._running[batch] = running = RunningBatch(runner, recording, new_batch())
            if recording is not None:  # the calls are recorded even if members are cancelled
                recording.hold(running, self._function.name)
            first = first or batch
        if (deadline := self._ask(scheduler.deadline)) is not None:
            self._timer = self.loop.call_at(deadline, self._schedule_dispatch)
        return first

    def _ask(self, question: Callable[..., T], *args: Any) -> T | None:
        """Return what the scheduler answers if calls wait; fail these calls if it raises.

        A `__hash__` or `__eq__` of the user's keys and members may raise now, and not before.
        """
        try:
            return question(*args) if self._scheduler.waiting else None
        except BaseException as exc:
            failed = self._scheduler.close()
            failures = failure_per_caller(exc, len(failed), self._function.name)
            for call, failure in zip(failed, failures, strict=True):
                call.resolve(failure)
            return None

    async def _run_batch(self, batch: Batch[QueuedCall] | None) -> None:
        """Run a batch. None: start those that are ready, and run the first of them."""
        task = asyncio.current_task()
        assert task is not None
        task.remove_done_callback(self._on_early_cancel)
        if batch is None and task is self._dispatching:  # else the queue has changed its loop
            batch = self._dispatch(task)
        if batch is None:
            return
        running = self._running[batch]
        args = [*map(_ARGS, batch.items)]
        asked = [batch]  # emptied later: the function's context outlives the members
        end: End | None = None
        failure: BaseException | None = None
        began = time.monotonic()
        try:
            end = self._enter(batch, running, asked)
            steps = self._run_function(batch, args)
            if self._function.is_async:  # else the steps are short: it runs in a thread
                steps = Steps(steps, self._function.name)
            results = await steps
        except BaseException as exc:  # SystemExit too: every caller gets a result
            note_has_run(exc)
            failure = exc
            results = failure_per_caller(exc, len(batch.items), self._function.name)
        self._counters.busy += time.monotonic() - began
        if end is not None:
            end(failure)
        args.clear()  # an exception keeps this frame alive
        asked.clear()
        self._finish_batch(batch, running, results)

    def _enter(
        self, batch: Batch[QueuedCall], running: RunningBatch, asked: list[Batch[QueuedCall]]
    ) -> End | None:
        """Enter the context of the function, in which `is_cancelled` asks for these batches."""
        if running.recording is not None:
            enter_record(running.recording)
        scope = BatchScope(frozenset((running.id,)), lambda: not running.is_finished)
        enter_scopes(frozenset((scope,)).union(*map(_SCOPES, batch.items)))
        note_call((BATCH, running.id[1]))
        ask_whether_given_up(functools.partial(_have_all_left, asked))
        if not (propagation.used or TRACER in modules):
            return None
        # Context variables that its callers share, and interceptors.
        callers = [call.context for call in batch.items if call.context is not None]
        if not callers:
            return None
        server = serving()
        waited = asyncio.get_running_loop().time() - batch.items[0].arrival
        began = time.monotonic() - waited
        worker = "" if server is None else server.name
        info = CallInfo("batch", self._function.name, worker, "", began, len(batch.items))
        return enter_batch(info, callers)

    def _run_function(
        self, batch: Batch[QueuedCall], args: Sequence[CallArgs]
    ) -> Coroutine[Any, Any, Sequence[Any]]:
        instance, function = batch.items[0].instance, self._function
        run: Coroutine[Any, Any, Sequence[Any]]
        if function.is_generator:
            stream = StreamedBatch(batch.items, can_interrupt=function.is_async)
            run = stream.run(function.iterate(instance, args))
        else:
            run = function.run(instance, args)
        return self._run_in_turn(batch, run) if self._has_limit else run

    async def _run_in_turn(
        self, batch: Batch[QueuedCall], run: Coroutine[Any, Any, Sequence[Any]]
    ) -> Sequence[Any]:
        """Await `run` in the turn of an exclusive instance."""
        with contextlib.closing(run):  # it may not have begun
            async with turns_of(batch.items[0].instance).hold(self._function.name):
                if _have_all_left((batch,)):
                    raise asyncio.CancelledError  # every caller has left while the batch waited
                return await run

    def _finish_batch(
        self, batch: Batch[QueuedCall], running: RunningBatch, results: Sequence[Any]
    ) -> None:
        """Free the slot of a batch and give its callers their results."""
        running.is_finished = True
        if running.recording is not None:
            running.recording.release(running)
        loop = self.loop
        if self._running.pop(batch, None) is None or loop is None or loop.is_closed():
            return  # the loop was closed, and the callers ended with it
        self._scheduler.finish_batch(loop.time())
        if self._scheduler.waiting:
            self._schedule_dispatch()
        for call, result in zip(batch.items, results, strict=True):
            call.resolve(result)


def _have_all_left(batches: Iterable[Batch[QueuedCall]]) -> bool:
    """Return whether all callers of these batches have left. In any thread."""
    return all(call.has_left for batch in batches for call in batch.items)


_queues: WeakIdentityDict[BatchQueue, None] = WeakIdentityDict()


async def close_queues() -> None:
    """Close every queue of the running loop."""
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(queue.close() for queue in _queues.owners() if queue.loop is loop))


def _new_scheduler(policy: Policy) -> Scheduler[QueuedCall]:
    return FillScheduler(policy) if isinstance(policy, Fill) else RoundScheduler(policy)


def _round_timeout(timed_out: TimedOutRound[Any], name: str) -> RoundTimeout:
    present = _names(timed_out.present)
    missing = _names(timed_out.missing) or "unknown (no other member has contributed before)"
    return RoundTimeout(
        f"a round of {name} timed out: {present} contributed; missing: {missing}. "
        "Contribute again, or give the round a quorum",
        timed_out.present,
        timed_out.missing,
    )


def _names(members: Iterable[Any]) -> str:
    try:
        return ", ".join(map(str, members))
    except Exception as exc:  # of the user's own class
        return f"members without a readable name ({exc!r})"
