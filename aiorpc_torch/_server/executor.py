"""Run calls on the event loop or in threads, and end each with its result."""

import asyncio
import contextvars
import functools
import logging
import operator
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from .._aio.deadlines import set_deadline
from .._aio.entry_queue import EntryQueue
from .._aio.fork import run_in_method
from .._aio.tasks import start_task
from .._aio.threads import DaemonThreadPool
from .._context.cancellation import ask_whether_given_up
from .._context.recording import enter_record
from .._torch.compat import RawFuture
from .._torch.thread_state import thread_settings
from .._wire.ancestry import enter_scopes
from .._wire.exceptions import note_has_run, try_add_note
from ..errors import CallTimeout, RpcError
from .calls import ServerCall
from .exclusive_calls import CallInTurn
from .stream_writer import (
    StreamCall,
    check_streamable,
    is_manager,
    pump_in_thread,
)

log = logging.getLogger("aiorpc_torch")


class Executor:
    """The executor of one worker's calls: on the running loop and in up to `threads` threads.

    The threads are not torch's RPC threads, which also complete replies and time-outs: 2N-1 nested
    calls would block N of them. (`test_deep_nesting_with_two_threads`)

    Attributes:
        refusal: makes the error of calls that may not start any more, None while they may.
        holds: returns whether a call is held, None while all may start.
        in_threads: calls of plain functions that run, answered or not.
        call_on_loop: runs a step on the loop, in the order in which it gets them. In any thread.
        submit_to_threads: runs each of some tasks in a thread. They start in order.
    """

    def __init__(self, threads: int) -> None:
        self.refusal: Callable[[], RpcError] | None = None
        self.holds: Callable[[ServerCall], bool] | None = None
        self.in_threads: set[ServerCall] = set()
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # of every call
        self._context.run(set_deadline, None)
        self._context.run(enter_scopes, frozenset())
        self._context.run(enter_record, None)
        steps: EntryQueue[Callable[[], None]] = EntryQueue(self._loop, operator.call)
        self.call_on_loop = steps.put
        settings = thread_settings()
        settings()
        self._threads = DaemonThreadPool(threads, settings)
        self.submit_to_threads = self._threads.submit
        self._deferring = 0  # scheduled steps that no later call may overtake
        self._scheduled: weakref.ref[ServerCall] | None = None  # the last scheduled start

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    def start(self, calls: Iterable[ServerCall], *, were_held: bool = False) -> None:
        """Start calls in order; those of plain functions that follow each other, together."""
        if self.refusal is not None:
            for call in calls:
                call.abandon(self.refusal())
            return
        if self.holds is not None and not were_held:
            calls = [each for each in calls if not self.holds(each)]
        plain: list[ServerCall] = []
        for call in calls:
            if not call.on_loop:
                plain.append(call)
                continue
            if plain:
                self._start_in_threads(plain)
                plain = []
            if (call.is_cancelled or call.deadline is not None) and _fail_if_expired(call):
                continue
            if call.joiner is not None:
                # A copy: `key=` and `weight=` are functions of the user, and may set variables.
                self._context.copy().run(call.join, call.joiner)
            elif isinstance(call, CallInTurn):
                self._wait_for_turn(call)
            else:
                self.start_task(call)
        if plain:
            self._start_in_threads(plain)

    def start_task(self, call: ServerCall, name: str = "") -> None:
        """Start a call on the loop, with the name of its function if that is known."""
        name = name or getattr(call.function, "__qualname__", None) or call.name
        coroutine, context = call.run(name), self._context.copy()
        if (self._deferring or self._scheduled) and self._must_defer():
            call.task = self._loop.create_task(coroutine, name=name, context=context)
        else:
            call.task = start_task(coroutine, self._loop, name, context)
        if not call.has_started:
            self._scheduled = weakref.ref(call)
            call.task.add_done_callback(functools.partial(_fail_unstarted, call))

    def _wait_for_turn(self, call: CallInTurn) -> None:
        try:
            has_turn = call.enter(lambda: self.call_on_loop(lambda: self._begin_turn(call)))
        except RuntimeError as exc:  # it would wait for itself
            call.fail(exc)
        else:
            if has_turn:
                self._begin_turn(call)

    def _begin_turn(self, call: CallInTurn) -> None:
        runs_on_loop = call.begin()
        if _fail_if_expired(call):
            return
        if runs_on_loop:
            self.start_task(call)
        else:
            self._start_in_threads((call,))

    def cancel(self, call: ServerCall) -> None:
        """Cancel a call, once. Its coroutine is resumed before later calls start."""
        if call.is_cancelled:  # a second cancellation would interrupt its cleanup
            return
        call.cancel()
        self._defer_starts()

    def _must_defer(self) -> bool:
        """Return whether a start is scheduled, or a cancelled coroutine's step: they come first."""
        if self._scheduled is not None:
            last = self._scheduled()
            if last is None or last.has_started:
                self._scheduled = None
        return self._scheduled is not None or self._deferring > 0

    def _defer_starts(self) -> None:
        """Let later calls start after the steps that are scheduled now."""
        self._deferring += 1
        self._loop.call_soon(self._end_deferral)

    def _end_deferral(self) -> None:
        self._deferring -= 1

    def _resume_on_loop(self, call: ServerCall, value: Any, context: contextvars.Context) -> None:
        call.task = self._loop.create_task(
            call.run(call.name, value), name=call.name, context=context
        )
        call.task.add_done_callback(functools.partial(_fail_unstarted, call))

    def _start_in_threads(self, calls: Sequence[ServerCall]) -> None:
        if self._must_defer():
            self._loop.call_soon(self._submit, calls)
            self._defer_starts()
        else:
            self._submit(calls)

    def _submit(self, calls: Sequence[ServerCall]) -> None:
        try:
            self.submit_to_threads(
                *[functools.partial(self._run_in_thread, each) for each in calls]
            )
        except RuntimeError as exc:  # no thread could be started
            for call in calls:
                call.fail(exc)

    # ── in a thread ─────────────────────────────────────────────────────────────────────────────

    def _run_in_thread(self, call: ServerCall) -> None:
        if (call.is_cancelled or call.deadline is not None) and _fail_if_expired(call):
            return
        self.in_threads.add(call)
        try:
            self._context.copy().run(self._run_plain, call)
        finally:
            self.in_threads.discard(call)

    def _run_plain(self, call: ServerCall) -> None:
        ask_whether_given_up(call.is_given_up)
        try:
            recording = call.recording
            steps = (call.invoke,) if recording is None else (recording.run, call.invoke)
            value = run_in_method(*steps)
        except BaseException as exc:  # SystemExit too goes to the caller
            if isinstance(exc, RuntimeError) and exc.args == ("no running event loop",):
                try_add_note(exc, _NO_LOOP)
            note_has_run(exc)
            call.fail(exc)
        else:
            try:
                self._on_return(call, value)
            except BaseException as exc:  # of the attributes of a user's object
                call.fail(exc)

    def _on_return(self, call: ServerCall, value: Any) -> None:
        # A function in torch's own async_execution style. A stream of it fails in check_streamable.
        if isinstance(value, RawFuture) and not isinstance(call, StreamCall):
            value.add_done_callback(functools.partial(_settle_from, call))
        elif (
            isinstance(value, Coroutine)
            or hasattr(type(value), "__anext__")
            or (isinstance(call, StreamCall) and is_manager(value))
        ):
            # An `async def` behind a plain decorator. The context is copied because this thread is
            # still inside it, and two threads cannot enter one context.
            context = contextvars.copy_context()
            self.call_on_loop(functools.partial(self._resume_on_loop, call, value, context))
        elif isinstance(call, StreamCall):
            self._stream_in_thread(call, value)
        else:
            call.succeed(value)

    def _stream_in_thread(self, call: StreamCall, value: Any) -> None:
        try:
            check_streamable(value, call.name)
        except TypeError as exc:
            call.fail(exc)
        else:
            pump_in_thread(call, value, functools.partial(self._submit_rest, call))

    def _submit_rest(self, call: StreamCall, task: Callable[[], None]) -> None:
        """Let a generator go on in a thread, or end: also that is a part of its call."""

        def run() -> None:
            try:
                task()
            finally:
                self.in_threads.discard(call)

        self.in_threads.add(call)
        try:
            self.submit_to_threads(run)
        except RuntimeError:  # no thread could be started
            self.in_threads.discard(call)
            raise

    def close(self, timeout: float, name: str) -> None:
        """Stop the threads, and log how many still run user code after `timeout` seconds."""
        if stuck := self._threads.close(timeout):
            log.warning("%d plain `def` calls still run on worker %s", stuck, name)


_NO_LOOP = (
    "(constructors and plain `def`s run in a thread, without an event loop: start tasks in an "
    "`async def` method, or create the object by an `async def` function that returns it)"
)


def _fail_if_expired(call: ServerCall) -> bool:
    """Fail a call that was cancelled or is past its deadline; return whether it was."""
    if call.is_cancelled:
        call.fail(asyncio.CancelledError())
    elif call.is_past_deadline():
        text = f"{call.name} on worker {call.worker!r} timed out before its start; it has not run"
        error = CallTimeout(text, worker=call.worker, method=call.name, may_have_run=False)
        call.fail(error)
    else:
        return False
    return True


def _fail_unstarted(call: ServerCall, task: "asyncio.Task[None]") -> None:
    """Answer a call whose task user code cancels before its first step: `run` does not begin."""
    if task.cancelled():
        call.fail(asyncio.CancelledError())


def _settle_from(call: ServerCall, future: "RawFuture[Any]") -> None:
    try:
        value = future.wait()
    except BaseException as exc:  # the worker that completed it chose the class
        call.fail(exc)
    else:
        call.succeed(value)
