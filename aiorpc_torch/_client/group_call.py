"""Calls of groups: awaited they give a list, iterated the results as they complete.

`_Running` starts the calls of the members and collects their outcomes, without a task for each.
"""

import asyncio
import contextlib
import contextvars
import functools
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from typing import Any, Generic, TypeVar

from .._aio.deadlines import ForeseenTimer, anyio_scope_deadline, deadline_in, earlier
from .._aio.items import ItemIterator, has_passed
from .._aio.loops import Wakeup, call_soon
from .._context.interception import CallInfo, End, Kind, begin_group, is_needed
from .._torch.compat import RRefBase
from .._torch.rrefs import owner_name
from .._wire.exceptions import text_of, try_add_note
from .._wire.messages import Arguments
from .._wire.shared_arguments import MemberArguments, encode_for_members
from .._wire.targets import GENERATOR_HINT, Target, call_name
from .._wire.wire_targets import EncodedTarget
from ..errors import CallTimeout, GroupError, RemoteError, WorkerGone
from .answers import exception_of
from .call import USED, LazyCall
from .connection import Connection
from .pending import InlineFuture, cancel, expire, foresee
from .pool import connection_to, current
from .routes import Destination, Route
from .supervised import Supervised

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

    def _start(self) -> "_Running":
        running = _Running(self._members(), self._timeout, self._retries)
        try:
            running.start((self._args, self._kwargs))
        except BaseException as exc:
            running.cancel(exc)
            raise
        return running

    def __await__(self) -> Generator[Any, Any, list[R]]:
        self._use()
        done, running = InlineFuture(asyncio.get_running_loop()), None
        try:
            running = self._start()
            running.on_outcome = functools.partial(_resume_at_end, done)
            if running.left:
                yield from done.__await__()
            if running.failures and has_passed(running.bound):
                yield  # if a scope's deadline has passed as well, the scope reports it
        except BaseException:
            if running is not None:
                running.cancel(asyncio.CancelledError())
            raise
        finally:
            self._steps = USED
        running.raise_failures()
        return running.results

    def __aiter__(self) -> "GroupResults[M, R]":
        self._use()
        return GroupResults(self._start())


def _name_of(members: Sequence[Member]) -> str:
    return call_name(members[0][1]) if members else "a call"


def _resume_at_end(done: InlineFuture, running: "_Running", _: int) -> None:
    if not running.left and done.set_result(None):
        done.resume()


class MemberCalls:
    """Calls of several members, from their start to their end. Confined to the running loop.

    Args:
        kind: "group" or "map", for interceptors.
        name: name of the call, for errors.
        size: number of members.
        timeout: seconds for all calls together.

    Attributes:
        bound: earlier of the calls' own deadline and a scope's.
    """

    def __init__(self, kind: Kind, name: str, size: int, timeout: float | None) -> None:
        self.name = name
        self._kind, self._size = kind, size
        self._loop = asyncio.get_running_loop()
        self._pool = current()  # also without members: a loop of such calls ends with the world
        self._due = deadline_in(timeout)
        if has_passed(self._due):
            text = f"{name} of a group timed out before the calls; they were not sent"
            raise CallTimeout(text, method=name, may_have_run=False)
        self.bound = earlier(self._due, anyio_scope_deadline())
        self._timer: ForeseenTimer | None = None
        self._calls: dict[int, InlineFuture] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # each waits until a call may be sent
        self._context = contextvars.copy_context()  # of the calls, and of callbacks
        self._end: End | None = None  # of interceptors
        self._is_cancelled = False

    def _begin(self) -> None:
        """Tell the interceptors, and let the deadline count."""
        if is_needed():
            now, worker = time.monotonic(), self._pool.worker
            info = CallInfo(self._kind, self.name, worker, "", now, self._size)
            self._context, self._end = begin_group(info)
        if self._due is not None:
            left = self._due - time.monotonic()
            self._timer = ForeseenTimer(left, self._foresee, self._expire)

    def _foresee(self, seconds: float) -> None:
        for call in [*self._calls.values()]:
            foresee(call, seconds)

    def _expire(self, seconds: float) -> None:
        for call in [*self._calls.values()]:
            expire(call, seconds)

    def _start_task(self, key: int, waiting: Coroutine[Any, Any, None]) -> None:
        context = self._context.copy()  # a context is entered once at a time
        name = f"aiorpc-{self._kind}"
        self._tasks[key] = task = self._loop.create_task(waiting, name=name, context=context)
        task.add_done_callback(functools.partial(self._on_task_end, key), context=self._context)

    def _on_task_end(self, key: int, task: "asyncio.Task[None]") -> None:
        if task.cancelled() and self._tasks.get(key) is task:  # by code that cancels all tasks
            del self._tasks[key]
            self._on_cancelled(key, asyncio.CancelledError())

    def _on_cancelled(self, key: int, exc: asyncio.CancelledError) -> None:
        """Note that other code has cancelled a task, perhaps before its first step."""
        raise NotImplementedError

    def _finish(self, failure: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        end, self._end = self._end, None
        if end is not None:
            end(failure)

    def cancel(self, reason: BaseException | None) -> None:
        """Cancel the calls that run, and those that wait; tell the interceptors the reason."""
        self._is_cancelled = True
        for call in self._calls.values():
            cancel(call)
        self._calls.clear()
        self._stop_waiting()
        self._finish(reason)

    def _stop_waiting(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()


class _Running(MemberCalls):
    """The calls of a group, one for each member.

    Attributes:
        members: name of the worker, RRef or supervised object of each, and what to call there.
        left: number of members without an outcome.
        results: value or exception of each member with an outcome.
        failures: exceptions of members, by position.
        on_outcome: called with this object and the position of each member that has an outcome.
    """

    def __init__(self, members: Sequence[Member], timeout: float | None, retries: int) -> None:
        super().__init__("group", _name_of(members), len(members), timeout)
        self.members: Sequence[Member] = [
            (each if isinstance(each, RRefBase | Supervised) else self._pool.find(each), target)
            for each, target in members
        ]
        self._retries = retries
        self._routes: dict[int, Route] = {}  # of members that may take another attempt
        self._rows: Sequence[MemberArguments] = ()
        self.left = len(members)
        self.results: list[Any] = [None] * self.left
        self.failures: dict[int, Exception] = {}
        self.on_outcome: Callable[[_Running, int], None]  # set after the start, before the first

    def start(self, arguments: Arguments) -> None:
        """Send the calls. If encoding fails, raise its exception before any call is sent."""
        try:
            self._rows = encode_for_members(arguments, len(self.members))
        except Exception as exc:
            try_add_note(exc, f"(while pickling the arguments of {self.name})")
            raise
        if self.members:
            self._begin()
        prepared = []
        for position, (member, target) in enumerate(self.members):
            destination: Destination = member, target
            if self._retries or isinstance(member, Supervised):
                route = self._routes[position] = Route(member, target, self._due, self._retries)
                if (chosen := route.choose()) is not None:
                    destination = chosen
                else:
                    route.wait()
                    self._start_task(position, self._try_again(position, route))
                    continue
            try:
                prepared.append(self._prepare(position, destination))
            except WorkerGone as exc:  # its process was replaced, or has left
                self._loop.call_soon(self._on_failure, position, exc)
        for each in prepared:
            self._context.run(self._send, *each)

    def _prepare(
        self, position: int, destination: Destination
    ) -> tuple[int, Connection, Target, EncodedTarget]:
        """Return the call of a member, encoded and not sent."""
        worker, target = destination
        connection = connection_to(worker)
        encoded = connection.encoder.member_target(target, self._rows[position])
        return position, connection, target, encoded

    def _send(
        self, position: int, connection: Connection, target: Target, encoded: EncodedTarget
    ) -> None:
        row = self._rows[position]
        self._calls[position] = future = connection.call_prepared(target, encoded, row, self.bound)
        on_answer = functools.partial(self._on_answer, position)
        future.add_done_callback(on_answer, context=self._context)

    async def _try_again(self, position: int, route: Route) -> None:
        """Send a member's call when another attempt may be made."""
        try:
            destination = await route.ready()
            self._send(*self._prepare(position, destination))
        except asyncio.CancelledError:
            raise
        except BaseException as exc:  # of the factory of a supervised object
            # Later: the outcome may resume the task of the call, and this is one, too.
            self._loop.call_soon(self._on_failure, position, exc)
        self._tasks.pop(position, None)

    def _on_cancelled(self, key: int, exc: asyncio.CancelledError) -> None:
        self._on_failure(key, exc)

    def _on_answer(self, position: int, future: InlineFuture) -> None:
        if self._calls.pop(position, None) is not None:
            answer = future.result()
            if (failure := exception_of(answer, future.target)) is None:
                self._set_outcome(position, answer)
            else:
                self._on_failure(position, failure)

    def _on_failure(self, position: int, failure: BaseException) -> None:
        if self._is_cancelled:
            return
        route = self._routes.get(position)
        if route is not None and route.failed(failure):
            route.wait()
            self._start_task(position, self._try_again(position, route))
            return
        self.failures[position] = exc = _as_member_error(failure, self.name)
        worker = self.members[position][0]
        with contextlib.suppress(RuntimeError):  # torch has stopped
            worker = worker if isinstance(worker, str) else owner_name(worker)
            worker = self._pool.worker_of(worker)
        try_add_note(exc, f"member {position + 1} of {len(self.members)}, on worker {worker!r}")
        self._set_outcome(position, exc)

    def _set_outcome(self, position: int, outcome: Any) -> None:
        self.results[position] = outcome
        self.left -= 1
        if not self.left:
            self._finish(next(iter(self.failures.values()), None))
        self.on_outcome(self, position)

    def _stop_waiting(self) -> None:
        super()._stop_waiting()
        for route in self._routes.values():
            route.stop()

    def raise_failures(self) -> None:
        """Raise GroupError if a member has failed."""
        if self.failures:
            exceptions = [self.failures[position] for position in sorted(self.failures)]
            first = f"{type(exceptions[0]).__name__}: {text_of(exceptions[0])}".partition("\n")[0]
            text = f"{self.name}: {len(exceptions)} of {len(self.members)} members failed"
            text = f"{text}; the first: {first}"
            raise GroupError(text, exceptions, self.results)


def _as_member_error(failure: BaseException, name: str) -> Exception:
    """Return the exception for a GroupError, which holds no BaseException."""
    if not isinstance(failure, Exception):
        error: Exception = RemoteError(f"{name} raised {failure!r}")
    elif any(GENERATOR_HINT in text for text in (text_of(failure), *_notes_of(failure))):
        error = TypeError(
            f"{name} is a generator, and a group does not stream: iterate the members one by one, "
            "as in `async for item in remote(group[0]).method()`"
        )
    else:
        return failure
    error.__cause__ = failure
    return error


def _notes_of(failure: BaseException) -> Sequence[str]:
    notes: Any = vars(failure).get("__notes__", ())  # a user's `__getattr__` may raise anything
    return [each for each in notes if isinstance(each, str)] if isinstance(notes, list) else ()


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
        self._running.cancel(asyncio.CancelledError())
        self._wakeup.set()

    def __del__(self) -> None:
        # Later: garbage may be collected anywhere.
        call_soon(self._loop, self._running.cancel, asyncio.CancelledError())


def _add(completed: deque[int], wakeup: Wakeup, running: _Running, position: int) -> None:
    if position not in running.failures:
        completed.append(position)
    wakeup.set()
