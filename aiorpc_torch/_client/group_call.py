"""Calls of groups: awaited they give a list, iterated the results as they complete.

`_Running` starts the calls of the members and collects their outcomes, without a task for each.
"""

import asyncio
import contextlib
import contextvars
import functools
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, Generic, TypeVar

from torch.distributed.rpc import RRef

from .._aio.deadlines import anyio_scope_deadline, deadline_in, earlier
from .._aio.items import ItemIterator, has_passed
from .._aio.loops import call_soon
from .._aio.tasks import InlineFuture
from .._aio.wakeup import Wakeup
from .._context.interception import CallInfo, End, begin_group, is_needed
from .._torch.compat import RRefBase
from .._torch.rrefs import owner_name
from .._wire.exceptions import try_add_note
from .._wire.messages import Arguments
from .._wire.shared_arguments import MemberArguments, encode_for_members
from .._wire.targets import GENERATOR_HINT, Target, call_name
from .._wire.wire_targets import EncodedTarget
from ..errors import CallTimeout, GroupError, RemoteError, WorkerGone, WorkerLost
from .answers import exception_of, is_own
from .call import ALREADY_AWAITED, USED, LazyCall
from .connection import Connection
from .pending import cancel, expire
from .pool import connection_to, current
from .retried import note_earlier_attempt
from .supervised import Supervised, Waiter, late_wait
from .supervised_calls import may_wait, target_on

M = TypeVar("M")
R = TypeVar("R")

Member = tuple[Any, Target]
"""The worker, the RRef or the supervised object of a member, and what to call there."""


class GroupCall(LazyCall[list[R]], Generic[M, R]):
    """A call of all members of a group. It gives a list, or if iterated pairs as they complete.

    The members are those at its start: workers, RRefs or supervised objects. `target` gives what to
    call on each. A call whose member is gone is made again up to `retries` times.
    """

    __slots__ = ("_args", "_group", "_kwargs", "_retries", "_target", "_timeout")

    def __init__(
        self,
        group: Collection[Any],
        target: Callable[[Any], Target],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None = None,
        retries: int = 0,
    ) -> None:
        self._steps = None
        self._group = group
        self._target = target
        self._args = args
        self._kwargs = kwargs
        self._timeout = timeout
        self._retries = retries

    def _what(self) -> str:
        members = self._members()
        return f"{_name_of(members)} by {len(members)} members"

    def _members(self) -> list[Member]:
        return [(member, self._target(member)) for member in self._group]

    def _run(self) -> Generator[Any, Any, list[R]]:
        done = InlineFuture(asyncio.get_running_loop())
        running = _Running(self._members(), self._retries)
        running.on_outcome = functools.partial(_resume_at_end, done)
        try:
            running.start((self._args, self._kwargs), self._timeout)
            if running.left:
                yield from done.__await__()
            if running.failures and has_passed(running.bound):
                yield  # if a scope's deadline has passed as well, the scope reports it
        except BaseException:
            running.cancel()
            raise
        finally:
            self._steps = USED
        running.raise_failures()
        return running.results

    def __aiter__(self) -> "GroupResults[M, R]":
        if self._steps is not None:
            raise RuntimeError(ALREADY_AWAITED)
        self._steps = USED
        running = _Running(self._members(), self._retries)
        running.start((self._args, self._kwargs), self._timeout)
        return GroupResults(running)


def _name_of(members: Sequence[Member]) -> str:
    return call_name(members[0][1]) if members else "a call"


def _resume_at_end(done: InlineFuture, running: "_Running", _: int) -> None:
    if not running.left and done.set_result(None):
        done.resume()


class _Running:
    """The calls of a group, from their start to their end. Confined to the running loop.

    Attributes:
        left: number of members without an outcome.
        results: value or exception of each member with an outcome.
        failures: exceptions of members, by position.
        bound: earlier of the calls' own deadline and a scope's.
        on_outcome: called with this object and the position of each member that has an outcome.
    """

    def __init__(self, members: Sequence[Member], retries: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = current()  # also without members: a loop of such calls ends with the world
        self.members = [self._named(*each) for each in members]
        self._retries = dict.fromkeys(range(len(members)), retries) if retries else {}
        self._rows: Sequence[MemberArguments] = ()  # kept for retries
        self._tries: dict[int, asyncio.Task[None]] = {}  # of members that are called again
        self._may_have_run: set[int] = set()  # those of which an earlier attempt may have
        self._context = contextvars.Context()  # of callbacks; they run no user code
        self._end: End | None = None  # of interceptors
        self._calls: dict[int, InlineFuture] = {}  # of members without an outcome
        self._waits: dict[int, Waiter] = {}  # of supervised members that are lost
        self._supervised: dict[int, tuple[RRef[Any], MemberArguments]] = {}  # RRefs that are called
        self._is_cancelled = False
        self._tried: dict[int, RRef[Any]] = {}  # for which an unsent call has waited
        self._timer: asyncio.TimerHandle | None = None
        self.left = len(members)
        self.results: list[Any] = [None] * self.left
        self.failures: dict[int, Exception] = {}
        self.bound: float | None = None
        self.on_outcome: Callable[[_Running, int], None] = _ignore

    def _named(self, member: Any, target: Target) -> Member:
        """Return a member, a worker by its name."""
        is_worker = not isinstance(member, RRefBase | Supervised)
        return (self._pool.find(member) if is_worker else member), target

    @property
    def name(self) -> str:
        """Return the name of the call, for errors."""
        return _name_of(self.members)

    def start(self, arguments: Arguments, timeout: float | None) -> None:
        """Send the calls. If encoding fails, raise its exception before any call is sent."""
        try:
            self._start(arguments, timeout)
        except BaseException as exc:
            self._finish(exc)  # before `cancel` does, which knows no reason
            self.cancel()
            raise

    def _start(self, arguments: Arguments, timeout: float | None) -> None:
        due = self._bounds(timeout)
        rows = self._encode(arguments)
        if self._retries:
            self._rows = rows
        send: Callable[..., None] = self._send
        if is_needed() and self.members:
            send = self._observe()  # first: a member may wait, in this context, for its object
        prepared = []
        for position, ((worker, target), row) in enumerate(zip(self.members, rows, strict=True)):
            if isinstance(worker, Supervised):
                if (rref := worker._start()) is None:
                    self._wait(position, worker, row)
                    continue
                worker, target = self._choose_rref(position, rref, row)
            try:
                connection = connection_to(worker)
            except WorkerGone as exc:  # its process was replaced, or has left
                self._loop.call_soon(self._on_failure, position, exc)
            else:
                encoded = connection.encoder.member_target(target, row)
                prepared.append((position, connection, target, encoded, row))
        for each in prepared:
            send(*each)
        if due is not None and self.left:
            left = due - time.monotonic()
            self._timer = self._loop.call_later(left, self._expire, left)

    def _observe(self) -> Callable[..., None]:
        """Tell the interceptors of the call; return how to send a member's."""
        me, now = self._pool.worker, time.monotonic()
        info = CallInfo("group", self.name, me, "", now, len(self.members))
        self._context, self._end = begin_group(info)
        run: Callable[..., None] = self._context.run
        return functools.partial(run, self._send)

    def _send(
        self,
        position: int,
        connection: Connection,
        target: Target,
        encoded: EncodedTarget,
        row: MemberArguments,
    ) -> None:
        future = connection.call_prepared(target, encoded, row, self.bound)
        self._calls[position] = future
        on_answer = functools.partial(self._on_answer, position)
        future.add_done_callback(on_answer, context=self._context)

    # ── members that are called again ───────────────────────────────────────────────────────────

    def _is_tried_again(self, position: int, failure: BaseException) -> bool:
        """Make the call of a member that is gone again, if it may be; return whether it is."""
        if not is_own(failure) or self._is_cancelled or not self._retries.get(position):
            return False
        self._retries[position] -= 1
        if failure.may_have_run:
            self._may_have_run.add(position)
        member = self.members[position][0]
        if isinstance(member, Supervised):
            if position in self._supervised:
                member._lose(self._supervised[position][0])
            self._wait(position, member, self._rows[position])
        else:
            trying = self._try_again(position, failure.worker)
            self._tries[position] = self._loop.create_task(
                trying, name="aiorpc-retry", context=contextvars.Context()
            )
        return True

    async def _try_again(self, position: int, worker: str) -> None:
        await self._pool.wait_until_probed(worker)
        del self._tries[position]
        self._try_to_send(position, *self.members[position], self._rows[position])

    def _try_to_send(
        self, position: int, worker: Any, target: Target, row: MemberArguments
    ) -> None:
        try:
            connection = connection_to(worker)
            encoded = connection.encoder.member_target(target, row)
            self._send(position, connection, target, encoded, row)
        except Exception as exc:
            self._on_failure(position, exc)

    # ── supervised members ──────────────────────────────────────────────────────────────────────

    def _wait(self, position: int, member: Supervised[Any], row: MemberArguments) -> None:
        self._waits[position] = waiter = member._wait()
        on_alive = functools.partial(self._on_alive, position, row)
        waiter.add_done_callback(on_alive, context=self._context)

    def _on_alive(self, position: int, row: MemberArguments, waiter: Waiter) -> None:
        """Send a call that has waited for its object."""
        if self._waits.pop(position, None) is None:  # it was cancelled, or is late
            return
        found = waiter.result()
        if (failure := exception_of(found, self.members[position][1])) is not None:
            self._set_outcome(position, None, failure)
            return
        self._try_to_send(position, *self._choose_rref(position, found, row), row)

    def _choose_rref(
        self, position: int, rref: RRef[Any], row: MemberArguments
    ) -> tuple[RRef[Any], Target]:
        """Note the RRef that a member's call uses; return it and what to call."""
        self._supervised[position] = rref, row
        return rref, target_on(self.members[position][1], rref)

    def _waits_again(self, position: int, failure: BaseException | None) -> bool:
        """Let the call of a supervised member wait if it was not sent; return whether it does."""
        member = self.members[position][0]
        if not isinstance(member, Supervised) or not isinstance(failure, WorkerLost):
            return False
        if self._is_cancelled:
            return False
        rref, row = self._supervised[position]
        if not may_wait(member, failure, rref) or self._tried.get(position) is rref:
            return False
        self._tried[position] = rref
        self._wait(position, member, row)
        return True

    def _encode(self, arguments: Arguments) -> Sequence[MemberArguments]:
        try:
            return encode_for_members(arguments, len(self.members))
        except Exception as exc:
            try_add_note(exc, f"(while pickling the arguments of {self.name})")
            raise

    def _bounds(self, timeout: float | None) -> float | None:
        """Set `bound`; return the calls' own deadline."""
        due = deadline_in(timeout)
        if has_passed(due):
            raise late_call(self.name)
        self.bound = earlier(due, anyio_scope_deadline())
        return due

    def _expire(self, seconds: float) -> None:
        for call in [*self._calls.values()]:
            expire(call, seconds)
        waits, self._waits = self._waits, {}
        tries, self._tries = self._tries, {}
        for position, waiter in (*waits.items(), *tries.items()):
            waiter.cancel()
            member, target = self.members[position]
            was_sent = position in self._may_have_run
            late = late_wait(target, self._worker_of(member), seconds, was_sent=was_sent)
            self._set_outcome(position, None, exception_of(late, target))

    def cancel(self) -> None:
        """Cancel the calls of members without an outcome."""
        self._is_cancelled = True
        for call in self._calls.values():
            cancel(call)
        self._calls.clear()
        for waiter in (*self._waits.values(), *self._tries.values()):
            waiter.cancel()
        self._waits.clear()
        self._tries.clear()
        self._finish(asyncio.CancelledError())

    def _finish(self, failure: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        end, self._end = self._end, None
        if end is not None:
            end(failure)

    def _on_answer(self, position: int, future: InlineFuture) -> None:
        if self._calls.pop(position, None) is not None:
            answer = future.result()
            failure = exception_of(answer, self.members[position][1])
            if failure is None:
                self._set_outcome(position, answer, None)
            else:
                self._on_failure(position, failure, answer)

    def _on_failure(self, position: int, failure: BaseException, answer: Any = None) -> None:
        if not (self._waits_again(position, failure) or self._is_tried_again(position, failure)):
            self._set_outcome(position, answer, failure)

    def _set_outcome(self, position: int, answer: Any, failure: BaseException | None) -> None:
        if failure is not None:
            if position in self._may_have_run:
                note_earlier_attempt(failure)
            self.failures[position] = self._noted(position, failure)
        self.results[position] = answer if failure is None else self.failures[position]
        self.left -= 1
        if not self.left:
            self._finish(next(iter(self.failures.values()), None))
        self.on_outcome(self, position)

    def _noted(self, position: int, failure: BaseException) -> Exception:
        worker = self._worker_of(self.members[position][0])
        exc = _as_member_error(failure, self.name)
        try_add_note(exc, f"member {position + 1} of {len(self.members)}, on worker {worker!r}")
        return exc

    def _worker_of(self, member: Any) -> Any:
        """Return the name of a member's worker, as far as torch knows it."""
        if isinstance(member, RRefBase | Supervised):
            with contextlib.suppress(RuntimeError):  # torch has stopped
                member = owner_name(member)
        return self._pool.worker_of(member) if isinstance(member, str) else member

    def raise_failures(self) -> None:
        """Raise GroupError if a member has failed."""
        if self.failures:
            exceptions = [self.failures[position] for position in sorted(self.failures)]
            text = f"{self.name}: {len(exceptions)} of {len(self.members)} members failed"
            raise GroupError(text, exceptions, self.results)


def _ignore(*_: object) -> None:
    """Ignore an outcome."""


def _as_member_error(failure: BaseException, name: str) -> Exception:
    """Return the exception for a GroupError, which holds no BaseException."""
    if not isinstance(failure, Exception):
        error: Exception = RemoteError(f"{name} raised {failure!r}")
    elif any(GENERATOR_HINT in text for text in (str(failure), *getattr(failure, "__notes__", ()))):
        error = TypeError(
            f"{name} is a generator, and a group does not stream: iterate the members one by one, "
            "as in `async for item in remote(group[0]).method()`"
        )
    else:
        return failure
    error.__cause__ = failure
    return error


class GroupResults(ItemIterator[tuple[M, R]]):
    """The members and their results, as they complete. An early end cancels the other calls."""

    _KIND = "result of this call"

    def __init__(self, running: _Running) -> None:
        super().__init__()
        self._bound = running.bound
        self._loop = asyncio.get_running_loop()
        self._running = running
        self._wakeup = Wakeup()
        self._completed: deque[int] = deque()
        # The callback must not keep this iterator: its end without `aclose` cancels the calls.
        running.on_outcome = functools.partial(_add, self._completed, self._wakeup)

    def __repr__(self) -> str:
        return f"<results of {self._running.name}, {self._running.left} to come>"

    async def _next(self) -> tuple[M, R]:
        running = self._running
        while not self._completed:
            if self._is_over:
                raise StopAsyncIteration
            if not running.left:
                running.raise_failures()
                raise StopAsyncIteration
            await self._wakeup.wait()
        position = self._completed.popleft()
        return running.members[position][0], running.results[position]

    def _stop(self) -> None:
        self._completed.clear()
        self._running.cancel()
        self._wakeup.set()

    def __del__(self) -> None:
        call_soon(self._loop, self._running.cancel)  # later: garbage may be collected anywhere


def _add(completed: deque[int], wakeup: Wakeup, running: _Running, position: int) -> None:
    if position not in running.failures:
        completed.append(position)
    wakeup.set()


def late_call(name: str) -> CallTimeout:
    """Return the error of a call of a group whose deadline had passed before it was sent."""
    text = f"{name} of a group timed out before the calls; they were not sent"
    return CallTimeout(text, method=name, may_have_run=False)
